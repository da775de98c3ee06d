"""Row and column factors: the part of a second moment that two vectors hold, and the second moment relative to it.

    f[i, j] = r[i] c[j] / mean(c),   r and c running means of g^2 over the columns and over the rows

(Shazeer and Stern 2018, arXiv 1804.04235). In logarithms (a float's own bits, :mod:`leantune.codec.log_ternary`) v and
its ratio to f are an integer subtraction apart, so going from one to the other and back is exact.
"""

import torch
from torch import Tensor

_ONE = 0x3F800000  # the pattern of 1.0
_LEAST, _MOST = 2.0**-126, 2.0**60
_REACH = 60 * (1 << 23)  # v is kept within 60 octaves of f: patterns then stay int32


class Factors:
    """r and c as they multiply: ``rows`` fp32 (rows,) is r / mean(c), ``columns`` fp32 (cols,) is c."""

    def __init__(self, rows: Tensor, columns: Tensor) -> None:
        mean = columns.mean()
        # Below, 1 / mean would not be finite, and every f is the smallest in any case.
        self.rows = rows * torch.where(mean > 2.0**-120, 1 / mean, 0.0)
        self.columns = columns

    def of(self, top: int, bottom: int, left: int, right: int) -> Tensor:
        """f of these rows and columns, fp32 (rows, cols), within [2^-126, 2^60]."""
        return torch.outer(self.rows[top:bottom], self.columns[left:right]).clamp_(_LEAST, _MOST)


def ratio(values: Tensor, factors: Tensor) -> Tensor:
    """The number whose logarithm is L(v) - L(f): fp32 of one shape with both, within 60 octaves of 1."""
    pattern = values.clamp(min=_LEAST).view(torch.int32) - factors.view(torch.int32)
    return pattern.clamp_(-_REACH, _REACH).add_(_ONE).view(torch.float32)


def product(ratios: Tensor, factors: Tensor) -> Tensor:
    """v from what :func:`ratio` gave, at least 2^-126."""
    pattern = ratios.view(torch.int32).sub(_ONE).clamp_(-2 * _REACH, 2 * _REACH).add_(factors.view(torch.int32))
    return pattern.clamp_(min=0x00800000).view(torch.float32)
