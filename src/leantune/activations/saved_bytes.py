"""How many bytes a forward pass keeps for backward: autograd is asked, nothing is estimated."""

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from leantune.errors import InvalidArgumentError


class SavedBytes:
    """Counts the storages that operators run inside ``with`` save for backward, each once, parameters excluded.

    Args:
        model: its parameters do not count, and `by_module` says which of its modules (the innermost one running)
            saved a storage first. Without it, parameters are known only by being ``nn.Parameter`` or views of one.

    A storage counts whole, as it stays allocated whole, however small the view that is saved. Works on real, meta and
    fake tensors. What a checkpointed block saves is not seen: its own hooks take those tensors. Nothing is copied, but
    autograd makes no in-place modification checks on tensors saved under it: use it to measure, not to train.

    >>> layer = nn.Linear(8, 4)
    >>> with SavedBytes(layer) as saved:
    ...     y = layer(torch.ones(3, 8)).relu()
    >>> saved.bytes, saved.by_module  # the input, and the output of relu
    (144, {'': 96, '(outside)': 48})
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.bytes = 0
        self.by_module: dict[str, int] = {}
        self._model = model
        self._hooks: Any = None
        self._handles: list[Any] = []
        self._running: list[str] = []
        # Weak references: no memory is kept alive, yet no address is taken for another storage's.
        self._seen: dict[int, StorageWeakRef] = {}

    def __enter__(self) -> "SavedBytes":
        if self._hooks is not None:
            raise InvalidArgumentError("this SavedBytes has been used already; make a new one for another measurement")
        if self._model is not None:
            for parameter in self._model.parameters():
                for plain in _plain_tensors(parameter):
                    self._first_time(plain)
            for name, module in self._model.named_modules():
                self._handles.append(module.register_forward_pre_hook(self._begin(name)))
                self._handles.append(module.register_forward_hook(self._end, always_call=True))
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, traceback)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, name: str) -> Callable[[nn.Module, Any], None]:
        def begin(module: nn.Module, inputs: Any) -> None:
            self._running.append(name)

        return begin

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._running:
            self._running.pop()

    def _pack(self, tensor: Tensor) -> Tensor:
        for plain in _plain_tensors(tensor):
            if self._first_time(plain) and not isinstance(tensor, nn.Parameter) and not _views_parameter(tensor):
                size = plain.untyped_storage().nbytes()
                self.bytes += size
                where = self._running[-1] if self._running else "(outside)"
                self.by_module[where] = self.by_module.get(where, 0) + size
        # Not the tensor itself: an operator that saves its own result would then never be freed.
        return tensor.detach()

    def _first_time(self, tensor: Tensor) -> bool:
        reference = StorageWeakRef(tensor.untyped_storage())
        if reference.cdata in self._seen:
            return False
        self._seen[reference.cdata] = reference
        return True


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def _views_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor._base, nn.Parameter)


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold a tensor's data: itself, or those a wrapper subclass (quantised, sharded) is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain_tensors(getattr(tensor, name))
