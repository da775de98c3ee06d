"""Dropout that keeps the state of the random generator for backward, where ``nn.Dropout`` keeps a mask.

Dropout is linear, so its backward is the same dropout applied to the gradient: from the same generator state the same
mask comes again. Forward and gradient equal those of ``torch.nn.functional.dropout`` to the bit, and the generator is
left where that would have left it. Kept: 5,056 bytes on a CPU, 16 on CUDA, whatever the size of the input.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional


class ReplayedDropout(torch.autograd.Function):
    """Saves the generator's state. Two backwards over one forward are equal, and leave the generator untouched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(_generator_state(x))
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
        with _replaying(state, grad.device):
            return functional.dropout(grad, ctx.p, training=True), None


def replayed_dropout(x: Tensor, p: float) -> Tensor:
    """``functional.dropout(x, p, training=True)`` without a mask kept for backward.

    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> y = replayed_dropout(x, 0.5)
    >>> y.sum().backward()
    >>> torch.equal(x.grad, y.detach())
    True
    """
    return x if p == 0 else ReplayedDropout.apply(x, p)


def state_bytes(device: torch.device) -> int:
    """Bytes that a forward keeps: the size of the device's generator state."""
    return 16 if device.type == "cuda" else int(torch.get_rng_state().numel())


def _generator_state(x: Tensor) -> Tensor:
    if isinstance(x, FakeTensor) or x.is_meta:  # no numbers are drawn; the bytes count all the same
        return torch.empty(state_bytes(x.device), dtype=torch.uint8, device=x.device)
    return torch.cuda.get_rng_state(x.device) if x.device.type == "cuda" else torch.get_rng_state()


@contextmanager
def _replaying(state: Tensor, device: torch.device) -> Iterator[None]:
    if isinstance(state, FakeTensor) or state.is_meta:
        yield
        return
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        if on_cuda:
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
        yield
