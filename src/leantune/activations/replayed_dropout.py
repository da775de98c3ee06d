"""Dropout that keeps the state of the random generator for backward, where ``nn.Dropout`` keeps a mask.

Dropout is linear, so its backward is the same dropout applied to the gradient: from the same generator state the same
mask comes again (`leantune.activations.random_state`). Forward and gradient equal those of
``torch.nn.functional.dropout`` to the bit, and the generator is left where that would have left it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from leantune.activations.random_state import dropped_from, random_state


class ReplayedDropout(torch.autograd.Function):
    """Saves the generator's state. Two backwards over one forward are equal, and leave the generator untouched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(random_state(x))
        ctx.p = p
        # The order in which a mask is filled follows the layout of what it is made for.
        ctx.stride = torch.empty_like(x, device="meta").stride()
        return functional.dropout(x, p, training=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (state,) = ctx.saved_tensors
        grad = grads[0]
        if grad.stride() != ctx.stride:
            grad = torch.empty_strided(grad.shape, ctx.stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        return dropped_from(state, grad, ctx.p), None


def replayed_dropout(x: Tensor, p: float) -> Tensor:
    """``functional.dropout(x, p, training=True)`` without a mask kept for backward.

    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> y = replayed_dropout(x, 0.5)
    >>> y.sum().backward()
    >>> torch.equal(x.grad, y.detach())
    True
    """
    return x if p == 0 else ReplayedDropout.apply(x, p)
