"""Which module is at work: in forward the one being called, in backward the one whose forward made the node."""

import bisect
import threading
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

ROOT = 0
"""Index of what no submodule of the model did: the model itself, and whatever runs outside it (loss, updates)."""

_LARGEST = (1 << 63) - 1
"""Nodes that accumulate into a leaf carry the largest unsigned number; as a signed one it is this."""


class ModuleCalls:
    """Follows a model's modules from `start` to `stop`; `current` is an index into `names`.

    Autograd numbers the nodes that forward makes. Noting the number at every entry and exit of a module tells later
    which module made a node, without a mark on the node. Nodes that another thread's forward makes (recomputation
    under CUDA) are counted for the module being called there.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.names = [""]
        self._codes: dict[int, int] = {}
        self._owners: dict[int, int] = {}  # id of parameter -> module
        for name, module in model.named_modules() if model is not None else ():
            if name:
                self._codes[id(module)] = len(self.names)
                self.names.append(name)
                for parameter in module.parameters(recurse=False):
                    self._owners.setdefault(id(parameter), self._codes[id(module)])
        self._stack = [ROOT]
        self._numbers: list[int] = []  # sequence number of the next node when the module at work changed
        self._at_work: list[int] = []
        self._thread = threading.get_ident()
        self._handles: list[Any] = []

    def start(self) -> None:
        """Begin to follow calls."""
        if len(self.names) > 1:
            self._handles = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ]

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def current(self, node: Any = None) -> int:
        """The module at work now; ``node`` is the autograd node being evaluated, if any."""
        if len(self._stack) > 1 or node is None:
            return self._stack[-1]
        return self.of_node(node)

    def of_node(self, node: Any) -> int:
        """The module in whose forward a node was made; for a leaf's own node, the module that holds the leaf."""
        number = sequence_number(node)
        if number == _LARGEST:
            return self._owners.get(id(getattr(node, "variable", None)), ROOT)
        place = bisect.bisect_right(self._numbers, number) - 1
        return self._at_work[place] if place >= 0 else ROOT

    def _enter(self, module: nn.Module, _arguments: Any) -> None:
        code = self._codes.get(id(module))
        if code is not None:
            self._stack.append(code)
            self._note()

    def _leave(self, module: nn.Module, _arguments: Any, _result: Any) -> None:
        code = self._codes.get(id(module))
        # A call that ended in an error may have skipped the exits of those inside it.
        if code is not None and code in self._stack:
            while self._stack.pop() != code:
                pass
            self._note()

    def _note(self) -> None:
        if threading.get_ident() == self._thread:
            number = torch._C._autograd._get_sequence_nr()
            if not self._numbers or number >= self._numbers[-1]:
                self._numbers.append(number)
                self._at_work.append(self._stack[-1])


def sequence_number(node: Any) -> int:
    """The number that autograd gave a node when it was made."""
    return int(node._sequence_nr()) & _LARGEST
