"""Ternary blocks: the three-level quantiser of momentum.

T(u) over a block: q = sign(u) where |u| > 0.612 RMS(u), else 0; s = mean |u| over the non-zeros, 0 if there are none.
For a Gaussian this threshold and scale minimise the squared error (distortion 0.19; Max 1960). s is stored as bfloat16
and what is computed from it uses the stored value.
"""

import torch
from torch import Tensor

THRESHOLD = 0.612


def quantise(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise fp32 blocks (rows, blocks, size); ``counts`` (blocks,) fp32 says how many elements of a block exist.

    Returns (trits fp32 of the same shape, scale bfloat16 (rows, blocks)). Absent elements must be 0; their trits are 0.
    """
    magnitude = values.abs()
    threshold = torch.linalg.vector_norm(values, dim=-1).mul_(counts.rsqrt() * THRESHOLD)
    # A block so small that its squares underflow has threshold 0; "greater than" then still keeps zeros at 0.
    chosen = magnitude > threshold.unsqueeze(-1)
    total = magnitude.mul_(chosen).sum(dim=-1)
    number = chosen.sum(dim=-1, dtype=torch.float32)
    scale = total.div_(number.clamp_(min=1)).to(torch.bfloat16)
    return torch.sign(values).mul_(chosen), scale


def dequantise(trits: Tensor, scale: Tensor) -> Tensor:
    """s * q in fp32 (rows, blocks, size), from trits of that shape and the stored bfloat16 scale (rows, blocks)."""
    return trits * scale.float().unsqueeze(-1)
