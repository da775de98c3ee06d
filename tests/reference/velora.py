"""VeLoRA the long way round, in float64: X is rebuilt from its projections, and everything else is autograd's.

A layer is linear in its weight, so  op(X^, W) + op(X - X^, W as a constant)  has the exact output and the exact
gradient by X, and by W the gradient that X^ gives.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def rebuilt(x: Tensor, v: Tensor, size: int) -> Tensor:
    """X^ from ``x`` (..., features): each sub-token of ``size`` in the direction of ``v`` alone."""
    features = x.shape[-1]
    padded = nn.functional.pad(x.double(), (0, -features % size))
    tokens = padded.unflatten(-1, (-1, size))
    return ((tokens @ v.double()).unsqueeze(-1) * v.double()).flatten(-2)[..., :features]


def rebuilt_channels(x: Tensor, v: Tensor, size: int, conv_groups: int) -> Tensor:
    """X^ from ``x`` (B, channels, ...): the channels of each convolution group are the features of a token."""
    parts = x.movedim(1, -1).chunk(conv_groups, dim=-1)
    return torch.cat([rebuilt(part, v, size) for part in parts], dim=-1).movedim(-1, 1)


def approximate(op: Callable[..., Tensor], x: Tensor, x_rebuilt: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The layer ``op(x, weight, bias)`` whose weight gradient sees ``x_rebuilt``."""
    return op(x_rebuilt.detach(), weight, bias) + op(x - x_rebuilt.detach(), weight.detach(), None)


def weight_gradient(x: Tensor, grad_output: Tensor, v: Tensor, size: int) -> Tensor:
    """``x`` (N, D), ``grad_output`` (N, out), ``v`` (size,)."""
    return grad_output.double().t() @ rebuilt(x, v, size)


def cell(x: Tensor, state: tuple[Tensor, ...], lstm: bool, layer: nn.Module, v: tuple[Tensor, Tensor]) -> tuple:
    """One step of an LSTM cell, (h, c), or of a GRU cell, (h,), whose two weight gradients are approximate."""
    linear, sizes = nn.functional.linear, [part.numel() for part in v]
    from_x = approximate(linear, x, rebuilt(x, v[0], sizes[0]), layer.weight_ih, layer.bias_ih)
    from_h = approximate(linear, state[0], rebuilt(state[0], v[1], sizes[1]), layer.weight_hh, layer.bias_hh)
    if lstm:
        take, forget, new, give = (from_x + from_h).chunk(4, dim=1)
        c = forget.sigmoid() * state[1] + take.sigmoid() * new.tanh()
        return give.sigmoid() * c.tanh(), c
    (x1, x2, x3), (h1, h2, h3) = from_x.chunk(3, dim=1), from_h.chunk(3, dim=1)
    reset, update = (x1 + h1).sigmoid(), (x2 + h2).sigmoid()
    return ((1 - update) * (x3 + reset * h3).tanh() + update * state[0],)


def adamw_on_whole_gradients(
    weight: Tensor, grads: list[Tensor], eps: Tensor, lr: float, decay: float, betas: tuple[float, float]
) -> Tensor:
    """The weight after AdamW's steps with an ``eps`` for each feature, (features,)."""
    momentum, variance = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, grad in enumerate(grads, 1):
        momentum = betas[0] * momentum + (1 - betas[0]) * grad
        variance = betas[1] * variance + (1 - betas[1]) * grad.square()
        direction = momentum / (1 - betas[0] ** step) / ((variance / (1 - betas[1] ** step)).sqrt() + eps)
        weight = weight * (1 - lr * decay) - lr * direction
    return weight


def unit_of_each_feature(v: Tensor, size: int, features: int) -> Tensor:
    """u, (features,): v over its own norm in each sub-token, of the padded tail without what is padding."""
    pieces = [v.double()[: min(size, features - first)] for first in range(0, features, size)]
    return torch.cat([piece / piece.norm() for piece in pieces])
