"""Clipping: the factor by which a gradient is multiplied before its update."""

from collections.abc import Iterable

import torch
from torch import Tensor

CLIP_MODES = ("per_tensor", "global", "none")
_SMALL = 1e-6  # in torch.nn.utils.clip_grad_norm_ too


def combined_norm(squares: Iterable[Tensor]) -> float:
    """The global norm from each tensor's squared norm (fp32, no dimensions), combined in fp32 in the order given."""
    parts = list(squares)
    return torch.stack(parts).sum().sqrt().item() if parts else 0.0


def clip_factor(norm: float, max_norm: float) -> float:
    """min(1, max_norm / (norm + 1e-6)).

    >>> clip_factor(0.5, 1.0), round(clip_factor(4.0, 1.0), 3)
    (1.0, 0.25)
    """
    return min(1.0, max_norm / (norm + _SMALL))
