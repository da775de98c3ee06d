"""How a tensor that forward made can be made again in backward, and what autograd holds in its place.

A `Recipe` is a function and the tensors (or recipes) it takes. `Held` and `Remade` are what the pack hook of a
`leantune.activations.exact.scope.Scope` returns: a tensor that is kept, and one that is not.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Union

import torch
from torch import Tensor

from leantune.errors import BackwardError

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""(pack, unpack) of ``torch.autograd.graph.saved_tensors_hooks``."""


@dataclass(frozen=True)
class Part:
    """A tensor that a recipe takes, and the version its data had when the recipe was written."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Part":
        # Detached: a recipe must not keep the graph that made its parts alive.
        return cls(tensor.detach(), tensor._version)


@dataclass(frozen=True)
class Recipe:
    """``make(*parts)`` is the tensor again, bit for bit."""

    make: Callable[..., Tensor]
    parts: tuple[Union[Part, "Recipe"], ...]

    def still_true(self) -> bool:
        """Whether no part has been changed in place since."""
        return all(
            part.still_true() if isinstance(part, Recipe) else part.tensor._version == part.version
            for part in self.parts
        )

    def leaves(self) -> list[Tensor]:
        """The tensors that have to be kept to make this one."""
        found: list[Tensor] = []
        for part in self.parts:
            found.extend(part.leaves() if isinstance(part, Recipe) else [part.tensor])
        return found


class Held:
    """A tensor that is kept: by the hooks around ours where there are any (gradient checkpointing has some), else by
    a reference, checked for changes in place as autograd does."""

    __slots__ = ("_unpack", "_value", "_version")

    def __init__(self, tensor: Tensor, outer: Hooks | None) -> None:
        self._unpack = None if outer is None else outer[1]
        self._version = tensor._version
        # Not the tensor itself: an operator that saves its own result would never be freed.
        self._value = tensor.detach() if outer is None else outer[0](tensor)

    def tensor(self) -> Tensor:
        if self._unpack is not None:
            return self._unpack(self._value)
        value: Tensor = self._value
        if value._version != self._version:
            raise BackwardError(
                f"a tensor of shape {tuple(value.shape)} that backward needs has been modified by an in-place "
                f"operation (version {value._version}, expected {self._version}). Autograd would refuse this too, "
                "unless the tensor is one that an exact saving keeps in place of another: leave that saving off "
                "(apply_exact_savings(..., swiglu=False / dropout=False / shared_adapter_input=False)), or make the "
                "operation out of place."
            )
        return value


class Remade:
    """A tensor that is not kept: made again on every unpacking, so two backwards over one forward are equal.

    ``views``: the layout that the recipe's tensor had, and that of the view of it which was saved.
    """

    __slots__ = ("_make", "_parts", "_views")

    def __init__(self, recipe: Recipe, outer: Hooks | None, views: "tuple[Layout, Layout] | None" = None) -> None:
        self._make = recipe.make
        self._parts = [hold(part, outer) for part in recipe.parts]
        self._views = views

    def tensor(self) -> Tensor:
        with torch.no_grad():
            value = self._make(*[part.tensor() for part in self._parts])
            if self._views is None:
                return value
            whole, view = self._views
            return view.of(whole.fitted(value))


def hold(part: Part | Recipe, outer: Hooks | None) -> Held | Remade:
    """What keeps a part of a recipe."""
    return Remade(part, outer) if isinstance(part, Recipe) else Held(part.tensor, outer)


@dataclass(frozen=True)
class Layout:
    """Size, strides and offset: how a tensor lies in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def at(cls, tensor: Tensor) -> "Layout":
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def fitted(self, value: Tensor) -> Tensor:
        """``value``, in these strides: hooks that offload need not give a tensor back in those it had."""
        return value if Layout.at(value) == self else value.new_empty_strided(self.size, self.stride).copy_(value)

    def of(self, value: Tensor) -> Tensor:
        """The view of ``value``'s storage that lies so."""
        return value.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class Autocast:
    """The autocast state of a device type in forward: what is made again in backward is made under the same one."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> "Autocast | None":
        if device.type == "meta":
            return None
        return cls(device.type, torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))

    def again(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled)


def as_in_forward(function: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    """``function``, to be called later under the autocast state of now."""
    state = Autocast.now(device)

    def run(*tensors: Tensor) -> Tensor:
        with nullcontext() if state is None else state.again():
            return function(*tensors)

    return run
