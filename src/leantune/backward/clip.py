"""Clipping: the factor by which a gradient is multiplied before its update."""

import math
from collections.abc import Iterable

CLIP_MODES = ("per_tensor", "global", "none")
_SMALL = 1e-6  # in torch.nn.utils.clip_grad_norm_ too


def combined_norm(squares: Iterable[float]) -> float:
    """The global norm from each tensor's squared norm; their sum is exact, so their order does not matter."""
    return math.sqrt(_sum(list(squares)))


def clip_factor(norm: float, max_norm: float) -> float:
    """min(1, max_norm / (norm + 1e-6)).

    >>> clip_factor(0.5, 1.0), round(clip_factor(4.0, 1.0), 3)
    (1.0, 0.25)
    """
    return min(1.0, max_norm / (norm + _SMALL))


def _sum(squares: list[float]) -> float:
    # fsum refuses what overflows or is not a number; a plain sum says so.
    return math.fsum(squares) if all(map(math.isfinite, squares)) else sum(squares)
