"""Cross-entropy of a linear output layer in float64, written out: all logits, all derivatives, no autograd."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class CrossEntropy:
    """The loss and its derivatives, float64."""

    loss: Tensor
    hidden: Tensor
    weight: Tensor
    bias: Tensor


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    divisor: float | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> CrossEntropy:
    """hidden (tokens, H), weight (V, H), labels (tokens,). The sum over counted tokens / divisor (None: their
    number)."""
    h, w = hidden.detach().double(), weight.detach().double()
    b = torch.zeros(w.shape[0], dtype=torch.float64) if bias is None else bias.detach().double()
    counted = labels != ignore_index
    if divisor is None:
        divisor = float(counted.sum())
    raw = scale * (h @ w.T + b)
    logits, slope = raw, torch.ones_like(raw)
    if softcap is not None:
        logits = softcap * torch.tanh(raw / softcap)
        slope = 1 - torch.tanh(raw / softcap) ** 2
    probability = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    loss = torch.zeros((), dtype=torch.float64)
    d_logits = torch.zeros_like(logits)
    for token in range(len(labels)):
        if counted[token]:
            loss -= torch.log(probability[token, labels[token]])
            d_logits[token] = probability[token]
            d_logits[token, labels[token]] -= 1
    d_linear = d_logits * slope * scale / divisor
    return CrossEntropy(loss / divisor, d_linear @ w, d_linear.T @ h, d_linear.sum(0))
