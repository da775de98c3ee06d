"""VeLoRA's weight gradient the long way round, in float64: rebuild X from its projections, then multiply."""

import torch
from torch import Tensor


def weight_gradient(x: Tensor, grad_output: Tensor, v: Tensor, size: int) -> Tensor:
    """``x`` (N, D), ``grad_output`` (N, out), ``v`` (size,)."""
    features = x.shape[1]
    groups = -(-features // size)
    padded = torch.zeros(x.shape[0], groups * size, dtype=torch.float64)
    padded[:, :features] = x.double()
    rebuilt = torch.zeros_like(padded)
    for group in range(groups):
        part = slice(group * size, (group + 1) * size)
        rebuilt[:, part] = torch.outer(padded[:, part] @ v.double(), v.double())
    return grad_output.double().t() @ rebuilt[:, :features]
