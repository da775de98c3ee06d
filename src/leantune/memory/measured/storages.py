"""The tensors inside what operators take and give, inside optimizer states, and inside wrapper subclasses."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = (Tensor, nn.Parameter)


def flat_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or results, which nest in lists at most."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from flat_tensors(value)


def plain_tensors(tensor: Tensor) -> Iterable[Tensor]:
    """The tensors that hold a tensor's bytes: itself, or the parts of a wrapper subclass (a DTensor)."""
    if type(tensor) in _PLAIN or not is_traceable_wrapper_subclass(tensor):
        return (tensor,)
    names, _ = tensor.__tensor_flatten__()
    return [plain for name in names for plain in plain_tensors(getattr(tensor, name))]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor inside nested dicts, lists, tuples and plain objects of an optimizer's state."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value))
