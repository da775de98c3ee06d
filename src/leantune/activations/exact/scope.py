"""A scope: the part of a forward pass whose saved tensors are looked at, one by one.

Inside, the model's own operators run, unchanged; the scope only watches which tensors could be made again (`Recipe`),
and when autograd saves one of those, a `Remade` goes into its graph instead of the tensor. Everything else is handed on
to the hooks around the scope, so gradient checkpointing, offloading and measurements work as they do without it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from leantune.activations.exact.ledger import Ledger
from leantune.activations.exact.recipe import Held, Hooks, Layout, Part, Recipe, Remade
from leantune.activations.exact.region import Inside, Region

_PRODUCTS = frozenset((torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__))
_CASTS = frozenset((Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type, Tensor.type_as))
_LOCAL = threading.local()


class _Known:
    """A tensor that the scope has seen being made."""

    def __init__(self, tensor: Tensor, recipe: Recipe | None) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.version = tensor._version
        self.layout = Layout.at(tensor)
        self.recipe = recipe  # None: kept as it is, but its products can be made again


class Scope:
    """What is known inside one scope."""

    def __init__(self, outer: Hooks | None) -> None:
        self.adapters = 0
        """Layers with adapters that are running: inside them, copies of an input in another dtype can be made
        again."""
        self._outer = outer
        self._known: dict[int, _Known] = {}
        self._ledgers: list[Ledger] = []
        self._region: Region | None = None
        self.hooks: Hooks = (self._pack, _unpack)

    def close(self) -> None:
        """Forget every tensor: a graph keeps the hooks of its saved tensors, and with them this scope."""
        self._known.clear()

    # -- what can be made again ---------------------------------------------------------------------------------------

    def knows(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` was announced to `learn`."""
        return self._find(tensor) is not None

    def learn(self, tensor: Tensor, recipe: Recipe | None) -> None:
        """``tensor`` can be made again by ``recipe`` (None: not it, but its products). Ignored where it shares memory
        with another tensor."""
        if not _is_plain(tensor) or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
            return
        known = _Known(tensor, recipe)
        if recipe is not None and any(_address(leaf) == known.storage.cdata for leaf in recipe.leaves()):
            return
        self._known[known.storage.cdata] = known

    def part(self, tensor: Tensor) -> Part | Recipe:
        """``tensor`` as a part of a recipe: its own recipe where it has one."""
        known = self._find(tensor)
        if known is not None and known.recipe is not None and known.layout == Layout.at(tensor):
            return known.recipe
        return Part.of(tensor)

    def saw_product(self, args: tuple[Any, ...], result: Any) -> None:
        """``result`` = the product of ``args``: can be made again if a factor is known."""
        if len(args) != 2 or not all(isinstance(factor, Tensor) for factor in args):
            return
        first, second = args
        if first.shape == second.shape and (self.knows(first) or self.knows(second)):
            self.learn(result, Recipe(torch.mul, (self.part(first), self.part(second))))

    def saw_cast(self, source: Any, result: Any) -> None:
        """``result`` = ``source`` in another dtype: made again where that keeps fewer bytes."""
        if not isinstance(source, Tensor) or not isinstance(result, Tensor) or source.dtype == result.dtype:
            return
        if source.device != result.device or not (source.is_floating_point() and result.is_floating_point()):
            return
        part = self.part(source)
        if isinstance(part, Recipe) or result.element_size() >= source.element_size():
            dtype = result.dtype
            self.learn(result, Recipe(lambda tensor: tensor.to(dtype), (part,)))

    def _find(self, tensor: Tensor) -> _Known | None:
        """What is known of the memory that ``tensor`` views, unless it was written to since."""
        if not self._known or not _is_plain(tensor):
            return None
        known = self._known.get(_address(tensor))
        return known if known is not None and known.version == tensor._version else None

    # -- what autograd saves ------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Held | Remade | Inside:
        if self._region is not None:
            self._note(tensor, self._region.leaves())
            return self._region.pack(self._outer)
        known = self._find(tensor)
        if known is not None and known.recipe is not None and known.recipe.still_true():
            self._note(tensor, known.recipe.leaves())
            layout = Layout.at(tensor)
            return Remade(known.recipe, self._outer, None if layout == known.layout else (known.layout, layout))
        self._note(tensor, [tensor])
        return Held(tensor, self._outer)

    def _note(self, plain: Tensor, kept: list[Tensor]) -> None:
        self._ledgers[-1].note(plain, kept)

    @contextmanager
    def region(self, region: Region) -> Iterator[None]:
        """What is saved inside is found again by running ``region`` again."""
        outside, self._region = self._region, region
        try:
            yield
        finally:
            self._region = outside
            region.close()

    @contextmanager
    def inside(self, ledger: Ledger, *, adapter: bool = False) -> Iterator["Scope"]:
        """Bytes go to ``ledger``."""
        self._ledgers.append(ledger)
        self.adapters += adapter
        try:
            yield self
        finally:
            self.adapters -= adapter
            self._ledgers.pop()


class _Watching(TorchFunctionMode):
    """Shows products and casts to a scope; every function runs as it would without."""

    def __init__(self, scope: Scope) -> None:
        super().__init__()
        self._scope = scope

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            self._scope.saw_product(args, result)
        elif func in _CASTS and self._scope.adapters and args:
            self._scope.saw_cast(args[0], result)
        return result


def can_run() -> bool:
    """Whether savings apply to what is being run: gradients are on, hooks are allowed, and nothing compiles (the
    compiler decides itself what to make again)."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    allowed: bool = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return allowed and torch.is_grad_enabled()


@contextmanager
def running(ledger: Ledger, *, adapter: bool = False) -> Iterator[Scope]:
    """Run what is inside in the scope that is open, or in a new one where there is none, or where hooks of another kind
    were set inside it."""
    scope = _open_scope()
    if scope is not None:
        with scope.inside(ledger, adapter=adapter):
            yield scope
        return
    scope = Scope(torch._C._autograd._top_saved_tensors_default_hooks(True))
    stack: list[Scope] = _LOCAL.__dict__.setdefault("scopes", [])
    stack.append(scope)
    try:
        with (
            torch.autograd.graph.saved_tensors_hooks(*scope.hooks),
            _Watching(scope),
            scope.inside(ledger, adapter=adapter),
        ):
            yield scope
    finally:
        stack.pop()
        scope.close()


def kept_for(tensor: Tensor) -> list[Tensor]:
    """What would be kept if autograd saved ``tensor`` here: itself, or what it can be made again from."""
    scope = _open_scope()
    part = None if scope is None else scope.part(tensor)
    return part.leaves() if isinstance(part, Recipe) and part.still_true() else [tensor]


def _open_scope() -> Scope | None:
    """The innermost scope, if its hooks are those that would be called now."""
    stack: list[Scope] = _LOCAL.__dict__.get("scopes", [])
    if not stack:
        return None
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return stack[-1] if top is not None and top[0] is stack[-1].hooks[0] else None


def _unpack(packed: Held | Remade | Inside) -> Tensor:
    return packed.tensor()


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
