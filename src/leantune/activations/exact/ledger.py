"""Bytes that a module's last training forward kept for backward, and would have kept without exact savings."""

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Storages = dict[int, tuple[StorageWeakRef, int]]
"""Storages by address with their bytes. The weak references keep no memory, and no address is used twice."""


class Ledger:
    """One module's storages. Tensors without data (a plan's trace) are not entered: a report is of real forwards."""

    def __init__(self) -> None:
        self.plain: Storages = {}
        """What autograd would have kept."""
        self.kept: Storages = {}
        """What is kept."""

    def note(self, plain: Tensor, kept: list[Tensor]) -> None:
        """Autograd saves ``plain``; ``kept`` is kept for it. Parameters and views of them count for nothing."""
        if isinstance(plain, nn.Parameter) or isinstance(plain._base, nn.Parameter):
            return
        _enter(self.plain, plain)
        for tensor in kept:
            _enter(self.kept, tensor)


def _enter(storages: Storages, tensor: Tensor) -> None:
    if tensor.is_meta or isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor):
        return
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
