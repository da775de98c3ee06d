"""Column factors: what of a second moment belongs to the columns; trits then say how an element differs from it.

    c[j] = running mean over the rows of g[i, j]^2,   f[j] = c[j] / mean(c)

(the column half of the factored second moment of Shazeer and Stern 2018, arXiv 1804.04235; the rows' half is in the
level of each block, which lies within a row). A column that never had a gradient is dead: v is 0 in it, and it takes no
part in the statistics of its blocks.
"""

import torch
from torch import Tensor

_LEAST = 2.0**-40
"""The smallest factor of a live column; the largest is the number of columns, by definition."""


class ColumnFactors:
    """c as it is used: three fp32 vectors (cols,), 0 in dead columns.

    ``times``: f; stored ratios times this are v. ``over``: 1 / f; v times this are the ratios to store. ``live``: 1.
    """

    def __init__(self, means: Tensor) -> None:
        live = means > 0
        relative = (means / means.double().mean().float()).clamp_(_LEAST)
        self.times = torch.where(live, relative, 0.0)
        self.over = torch.where(live, 1 / relative, 0.0)
        self.live = live.float()
