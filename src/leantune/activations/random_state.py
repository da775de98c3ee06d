"""The state of torch's generator before a dropout, kept so that the same mask can be drawn again.

Not a seed of our own: the mask is the one ``torch.nn.functional.dropout`` drew, so losses and gradients are those of
the plain model under the same ``torch.manual_seed``, bit for bit. A state is 5,056 bytes on a CPU and 16 on CUDA.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

_STATE_BYTES = {"cpu": 5056, "cuda": 16}


def state_bytes(device: torch.device) -> int | None:
    """Size of a generator's state; None where this device's generator cannot be asked, or must not be (a CUDA graph
    that is being captured)."""
    if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return None
    return _STATE_BYTES.get("cpu" if device.type == "meta" else device.type)


def random_state(like: Tensor) -> Tensor:
    """The state of the generator that fills tensors on ``like``'s device: uint8, on the CPU. Without data where
    ``like`` has none."""
    size = state_bytes(like.device)
    if like.is_meta or isinstance(like, FakeTensor):
        return torch.empty(size or 0, dtype=torch.uint8, device="meta" if like.is_meta else "cpu")
    state = _generator(like.device).get_state()
    # Copied by address into a tensor that an operator made: memory trackers see what operators make.
    copy = torch.empty(state.numel(), dtype=torch.uint8)
    ctypes.memmove(copy.data_ptr(), state.data_ptr(), state.numel())
    return copy


@contextmanager
def drawing_from(state: Tensor, device: torch.device) -> Iterator[None]:
    """Random numbers on ``device`` are drawn from ``state`` inside; the generator is as before afterwards."""
    if state.is_meta or isinstance(state, FakeTensor):
        yield
        return
    generator = _generator(device)
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


def dropped_from(state: Tensor, x: Tensor, p: float) -> Tensor:
    """``functional.dropout(x, p, training=True)`` with the mask that was drawn after ``state``: dropout is linear, so
    its gradient is the same dropout of a gradient."""
    with drawing_from(state, x.device):
        return functional.dropout(x, p, training=True)


def mask_bytes(x: Tensor) -> int:
    """Bytes of the mask that torch's own dropout of ``x`` keeps: one an element on CUDA, else an element's own size."""
    return x.numel() * (1 if x.device.type == "cuda" else x.element_size())


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator
