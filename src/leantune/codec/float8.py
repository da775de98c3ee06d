"""Columns of numbers in 8 bits each: float8 (e4m3) with one power-of-two scale a column.

A column's scale is kept as the biased exponent of its largest magnitude, one byte, so scaling is exact in both
directions and rounding is all that an encoding loses: 3 bits of mantissa down to 2^-13 of the column's largest number,
and a fixed grid of 2^-16 of it below.
"""

import torch
from torch import Tensor

from leantune.codec.rounding import round_stochastic_

FLOAT8 = torch.float8_e4m3fn
_TOP = 7
"""The largest magnitude of a column is scaled into [2^7, 2^8): rounding it up stays below float8's largest, 448."""
_BIAS = 127
_LEAST_EXPONENT = 8
"""Columns whose largest magnitude is under 2^-119 become zeros: their scale would not be a normal fp32 number."""


def encode_columns(values: Tensor, random16: Tensor) -> tuple[Tensor, Tensor]:
    """Round fp32 ``values`` (k, columns), overwritten, stochastically to float8; returns (codes, exponents).

    ``random16``: int32 (k, columns) in [0, 65536). Codes are the bytes of float8_e4m3fn (k, columns), as uint8 (torch
    cannot pickle float8), exponents uint8 (columns,),
    0 where a column is all zero: k + 1 bytes a column. In expectation a number decodes to itself (to 2^-20 of it).

    >>> codes, exponents = encode_columns(torch.tensor([[1.0, 0.0], [-0.3125, 0.0]]), torch.zeros(2, 2).int())
    >>> exponents.tolist(), decode_columns(codes, exponents).tolist()
    ([127, 0], [[1.0, 0.0], [-0.3125, 0.0]])
    """
    exponents = values.abs().amax(dim=0).view(torch.int32).bitwise_right_shift_(23)
    exponents.masked_fill_(exponents < _LEAST_EXPONENT, 0)
    scaled = values.mul_(_power_of_two(_BIAS + _TOP - exponents, exponents > 0))
    return round_stochastic_(scaled, FLOAT8, random16).to(FLOAT8).view(torch.uint8), exponents.to(torch.uint8)


def decode_columns(codes: Tensor, exponents: Tensor) -> Tensor:
    """fp32 (k, columns) from what :func:`encode_columns` made; exact."""
    wide = exponents.to(torch.int32)
    return codes.view(FLOAT8).float().mul_(_power_of_two(wide - (_BIAS + _TOP), wide > 0))


def _power_of_two(power: Tensor, where: Tensor) -> Tensor:
    """fp32 2^power, ``power`` int32 in [-126, 127]; 0 outside ``where``."""
    return power.add(_BIAS).mul_(where).bitwise_left_shift_(23).view(torch.float32)
