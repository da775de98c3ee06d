"""Writing fp32 results into narrower weights: stochastic rounding, nearest rounding, and a 24-bit weight in two parts.

Round-to-nearest loses an update smaller than half a unit in the last place: at a relative update of 1e-4 a bfloat16
weight receives 6 % of it. Stochastic rounding goes up with probability equal to the fraction, so the expectation is
exact.
"""

import torch
from torch import Tensor

_BF16_MASK = -65536  # 0xFFFF0000 as int32
_FP16_MASK = -8192  # 0xFFFFE000 as int32
_FP16_SMALLEST_NORMAL = 2.0**-14
_FP16_STEP = 2.0**-24
_FP8_MASK = -1048576  # 0xFFF00000 as int32
_FP8_SMALLEST_NORMAL = 2.0**-6
_FP8_STEP = 2.0**-9


def round_stochastic_(values: Tensor, dtype: torch.dtype, random16: Tensor) -> Tensor:
    """Round fp32 ``values`` in place to numbers that ``dtype`` (bfloat16, float16 or float8_e4m3fn) holds exactly.

    ``random16``: int32 in [0, 65536), one an element, same shape. Returns ``values``, which are exact in ``dtype``:
    copying them loses nothing. Infinities and NaN stay what they are; a value beyond the largest finite number rounds
    to it or to infinity. float8_e4m3fn has no infinity: its values must lie within +-448.
    """
    pattern = values.view(torch.int32)
    if dtype is torch.bfloat16:
        # The noise cannot leave the 16 dropped bits of an infinity, and NaN stays NaN.
        pattern.add_(random16).bitwise_and_(_BF16_MASK)
    elif dtype is torch.float16:
        _round_to_grid_(values, random16 >> 3, random16, _FP16_MASK, _FP16_SMALLEST_NORMAL, _FP16_STEP)
    elif dtype is torch.float8_e4m3fn:
        _round_to_grid_(values, random16 << 4, random16, _FP8_MASK, _FP8_SMALLEST_NORMAL, _FP8_STEP)
    else:
        raise TypeError(f"stochastic rounding is for bfloat16, float16 and float8_e4m3fn, not {dtype}")
    return values


def _round_to_grid_(
    values: Tensor, noise: Tensor, random16: Tensor, mask: int, smallest_normal: float, step: float
) -> None:
    """Round to the mantissa that ``mask`` leaves; below the smallest normal number, to a fixed grid of ``step``."""
    small = values.abs() < smallest_normal
    on_grid = values.div(step).add_(random16.float().mul_(2.0**-16)).floor_().mul_(step)
    values.view(torch.int32).add_(noise).bitwise_and_(mask)
    values.copy_(torch.where(small, on_grid, values))


def split_24(values: Tensor, random16: Tensor | None) -> tuple[Tensor, Tensor]:
    """Split fp32 ``values`` into a bfloat16 weight and an int8 remainder, together 24 of the 32 bits.

    The bfloat16 part is the nearest one, so the model computes with an ordinary bfloat16 weight; the remainder counts
    units of 2^-8 of its last place. The 8 bits dropped are rounded stochastically with ``random16`` (int32), or to
    nearest if None.
    """
    pattern = values.view(torch.int32)
    noise = torch.full_like(pattern, 128) if random16 is None else random16 & 0xFF
    units = pattern.add(noise).bitwise_right_shift_(8)  # 24-bit integer, sign kept
    high = units.add(128).bitwise_right_shift_(8)
    remainder = units.sub_(high << 8)
    return high.to(torch.int16).view(torch.bfloat16), remainder.to(torch.int8)


def join_24(weight: Tensor, remainder: Tensor) -> Tensor:
    """fp32 values from the two parts that :func:`split_24` made."""
    pattern = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return pattern.add_(remainder.to(torch.int32).bitwise_left_shift_(8)).view(torch.float32)
