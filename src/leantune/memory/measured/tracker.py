"""Where memory goes during a real step: every tensor storage that appears and disappears, attributed to a part.

A ``TorchDispatchMode`` sees the result of every operator, in forward, in backward and in optimizer hooks; each storage
is counted once, however many views share it, and a weak reference says when it is freed. Parts are decided at the end,
when it is known what a storage became (a ``.grad``, an optimizer state, an activation kept for backward).

What it cannot see: memory that C++ code allocates without an operator (matmul packing buffers, attention workspaces,
threads' stacks), the allocator's slack, and the interpreter. `leantune.memory.measured.process` measures
those from outside.
Tracking costs about 30 microseconds an operator: it is for a step or two, not for a whole run. Our optimizers make
hundreds of operators for every 65,536 weights, so of their updates only the first of each parameter shape is followed
operator by operator; the others are counted with the same temporaries (``every_update=True`` follows them all).
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

from leantune.activations.tiled_cross_entropy import TiledCrossEntropy
from leantune.errors import BackwardError, MemoryBudgetError
from leantune.memory.measured.allocations import CODE, PHASE, UNKNOWN, Allocations
from leantune.memory.measured.module_calls import ModuleCalls, sequence_number
from leantune.memory.measured.modules import ModuleRow, module_rows
from leantune.memory.measured.process import is_out_of_memory
from leantune.memory.measured.storages import flat_tensors, plain_tensors, tensors_in
from leantune.memory.measured.timeline import BACKWARD, FORWARD, OTHER, PHASES, UPDATE_PHASE, MemoryTimeline
from leantune.memory.parts import (
    GRADIENTS,
    INPUTS,
    LABELS,
    LOSS,
    OPTIMIZER_STATES,
    RECOMPUTE,
    TEMPORARIES,
    UPDATE,
    WEIGHTS,
)
from leantune.memory.quantised import hidden_bytes, scales
from leantune.memory.sizes import format_bytes

_CUDA_ROUND = 512
_ADDITION = torch.ops.aten.add.Tensor
_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.new_empty_strided.default)
_LOSS_NODES = ("CrossEntropy", "NllLoss", "LogSoftmax")


@dataclass(frozen=True)
class Failure:
    """Where memory ran out: the budget's, or the device's."""

    operator: str
    phase: str
    module: str
    event: int
    """Of the timeline: what was in use."""


class MemoryTracker(TorchDispatchMode):
    """Tracks the memory of what runs inside ``with tracker:`` (or between `start` and `stop`), by part.

    Args:
        model: its parameters and buffers are "weights"; its trainable parameters' gradients are "gradients"; the rows
            of its output embedding (``get_output_embeddings()``, where it has one) say how wide logits are.
        optimizers: their state is "optimizer_states"; what their updates allocate for a moment is "update".
        vocabulary: width of the logits, where the model cannot be asked.
        every_update: follow every parameter's update operator by operator, however long that takes.
        budget: bytes; tracked code that would hold more is stopped by a MemoryBudgetError, as if the device were full.
        unseen_are_new: storages that no operator made count from the moment they are met, not from the beginning: for
            code that reads tensors from files.

    Use it once. Nothing about the model or the optimizers is left changed after `stop`. Do not use it around
    ``torch.compile``d code: compiled graphs hide their operators.

    >>> layer = nn.Linear(256, 256, bias=False)
    >>> with MemoryTracker(layer) as tracker:
    ...     layer(torch.ones(4, 256)).sum().backward()
    >>> tracker.timeline().part_peaks()["gradients"] == 256 * 256 * 4
    True
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizers: Optimizer | Sequence[Optimizer] = (),
        *,
        vocabulary: int | None = None,
        every_update: bool = False,
        budget: int | None = None,
        unseen_are_new: bool = False,
    ) -> None:
        super().__init__()
        self._model = model
        self._optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        head = _output_embedding(model)
        self._head_shape = None if head is None else tuple(head.shape)
        self._head_trains = head is not None and head.requires_grad
        self._vocabulary = vocabulary or (self._head_shape[0] if self._head_shape else None)
        parameters = list(model.parameters()) if model is not None else []
        grouped = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        self._parameters: list[Tensor] = list({id(p): p for p in [*parameters, *grouped]}.values())
        self._every_update = every_update
        self._budget = budget
        self._unseen_are_new = unseen_are_new
        self._calls = ModuleCalls(model)
        self._update_peaks: dict[Any, int] = {}  # (optimizer, shape, dtype) -> temporaries of such an update
        self._wrapped: list[Any] = []
        self._device_type = self._parameters[0].device.type if self._parameters else None

        self._log = Allocations()
        self.failure: Failure | None = None
        self._forward_ends: list[int] = []
        self._graph_task = -1
        self._updating = 0
        self._running = False
        self._inside = 0  # allocations before this one existed when tracking began
        self._handles: list[Any] = []

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> "MemoryTracker":
        """Begin tracking; the same as entering the ``with`` block."""
        return self.__enter__()

    def stop(self) -> None:
        """End tracking; the same as leaving the ``with`` block. Done again, it does nothing. Modes entered since
        `start` must have been left."""
        self.__exit__(None, None, None)

    def __enter__(self) -> "MemoryTracker":
        if self._log.times:
            raise BackwardError("this MemoryTracker has already been used; make a new one for another measurement")
        self._log.began = time.perf_counter()
        self._log.event()
        for tensor in self._parameters:
            self._preexisting(tensor, WEIGHTS)
            if tensor.grad is not None:
                self._preexisting(tensor.grad, GRADIENTS)
        if self._model is not None:
            for tensor in [*self._model.buffers(), *scales(self._model)]:
                self._preexisting(tensor, WEIGHTS)
        self._mark_states(existed=True)
        self._inside = len(self._log)
        self._register_hooks()
        self._calls.start()
        self._running = True
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if not self._running:
            return
        super().__exit__(exc_type, exc_value, traceback)
        self._running = False
        self._calls.stop()
        self._log.event()
        self._mark_states()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for optimizer in self._wrapped:
            del optimizer.update
            vars(optimizer).pop("update_in_tiles", None)
        self._wrapped.clear()
        self._log.forget_storages()

    def _register_hooks(self) -> None:
        for parameter in self._parameters:
            if parameter.requires_grad and parameter.is_leaf:
                # Before accumulation, so that it also sees gradients that a fused backward frees in its own hook.
                self._handles.append(parameter.register_hook(_Watching(self._mark_gradient)))
                self._handles.append(parameter.register_post_accumulate_grad_hook(_Watching(self._mark_accumulated)))
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._update_begins))
            self._handles.append(optimizer.register_step_post_hook(self._update_ends))
            if callable(getattr(optimizer, "update", None)) and "update" not in vars(optimizer):
                tracked = functools.partial(self._update, optimizer.update, optimizer)  # type: ignore[attr-defined]
                optimizer.update = tracked  # type: ignore[attr-defined]
                self._wrapped.append(optimizer)
            if hasattr(optimizer, "update_in_tiles") and "update_in_tiles" not in vars(optimizer):
                optimizer.update_in_tiles = functools.partial(self._update_in_tiles, optimizer.update_in_tiles)

    # -- what happens -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._log.absorbed.clear()
        self._follow_phase()
        for tensor in flat_tensors(args):
            self._see(tensor)
        if kwargs:
            for tensor in flat_tensors(kwargs.values()):
                self._see(tensor)
        try:
            result = func(*args, **kwargs)
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                self._fail(str(func))
            raise
        if isinstance(result, Tensor):
            self._see(result, func)
            if func is _ADDITION and self._graph_task >= 0:
                self._absorb(args, result)
        elif isinstance(result, list | tuple):
            for tensor in flat_tensors(result):
                self._see(tensor, func)
        if hidden := hidden_bytes(func, args):
            self.touch(TEMPORARIES, hidden)
        return result

    def _follow_phase(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            if task >= 0:
                self._backward_begins()
        if self._updating:
            phase = UPDATE_PHASE
        elif task >= 0:
            phase = BACKWARD
        elif torch.is_grad_enabled() or self._log.phase == PHASE[FORWARD]:
            phase = FORWARD
        else:
            phase = OTHER
        self._log.phase = PHASE[phase]

    def _backward_begins(self) -> None:
        self._forward_ends.append(len(self._log.times) - 1)
        self._log.keep_activations()

    def _absorb(self, args: tuple[Any, ...], result: Tensor) -> None:
        """A sum of two gradients by the autograd engine, which adds in place to the first where nobody else holds it,
        but never under a dispatch mode. If the first is freed at once (`_freed`), it ends where the sum begins."""
        first = args[0]
        node = torch._C._current_autograd_node()
        if node is None or not isinstance(first, Tensor) or first._is_view() or first.shape != result.shape:
            return
        old, new = (self._log.living.get(tensor.untyped_storage()._cdata) for tensor in (first, result))
        # An operand that the node itself made is the node's own arithmetic.
        if old is not None and new is not None and self._log.nodes[old] not in (-1, sequence_number(node)):
            self._log.absorbed[old] = self._log.births[new]

    def _guess(self, tensor: Tensor, made_by: Any) -> str:
        """The part of a new storage if nothing more is learnt about it; ``tensor`` is the first one seen in it."""
        if self._updating:
            return UPDATE
        shape = tensor.shape
        wide = self._vocabulary is not None and len(shape) >= 2 and shape[-1] == self._vocabulary
        if self._graph_task < 0:
            return LOSS if wide or TiledCrossEntropy.walking else TEMPORARIES
        node = torch._C._current_autograd_node()
        name = node.name() if node is not None else ""
        if name.endswith(
            "AccumulateGrad"
        ):  # the engine copying a gradient it may not take, or a hook updating a weight
            copied = made_by in _COPIES and shape == getattr(node, "variable", tensor).shape
            return GRADIENTS if copied else UPDATE
        if torch.is_grad_enabled():
            return LOSS if wide else RECOMPUTE
        if self._head_trains and tuple(shape) == self._head_shape:
            return GRADIENTS  # a partial gradient of a (tied) head, not yet accumulated
        if wide or any(part in name for part in _LOSS_NODES):
            return LOSS
        return TEMPORARIES

    def _see(self, tensor: Tensor, made_by: Any = None) -> None:
        """Take note of a tensor's storage: made by this operator, or, without one, met as an argument."""
        for plain in plain_tensors(tensor):
            if self._device_type is not None and plain.device.type not in (self._device_type, "meta"):
                continue
            try:
                storage = plain.untyped_storage()
            except (NotImplementedError, RuntimeError):
                continue  # sparse and opaque tensors have no storage of their own
            key = storage._cdata
            known = self._log.living.get(key)
            size = self._rounded(storage.nbytes(), plain.device.type)
            if known is not None:
                if self._log.sizes[known] != size:
                    self._log.resized(key, known, size)
                continue
            if size == 0:
                continue
            if made_by is None:
                # Made before tracking began, or where no operator shows it.
                birth = self._log.event() if self._unseen_are_new else 0
                self._add(storage, size, INPUTS, CODE[INPUTS], birth=birth, outside=False)
                continue
            guess = self._guess(plain, made_by)
            outside = self._graph_task < 0 and not self._updating
            known_part = CODE[LOSS] if guess == LOSS else UNKNOWN
            self._add(storage, size, guess, known_part, birth=self._log.event(), outside=outside)
            self._check_budget(size, guess, made_by)

    def _check_budget(self, size: int, part: str, made_by: Any) -> None:
        if self._budget is None or self._log.live <= self._budget:
            return
        budget, self._budget = self._budget, None  # said once: what unwinds now may still allocate
        self._fail(str(made_by), self._log.modules[-1])
        phase, module = PHASES[self._log.phase], self.failure.module if self.failure else ""
        raise MemoryBudgetError(
            f"out of memory: {made_by} in {phase} asked for {format_bytes(size)} ({LABELS[part]}, in {module}), which "
            f"makes {format_bytes(self._log.live)} of live tensors where the budget is {format_bytes(budget)}",
            live=self._log.live,
            budget=budget,
            size=size,
            part=part,
            phase=phase,
            module=module,
            operator=str(made_by),
        )

    def _fail(self, operator: str, module: int | None = None) -> None:
        """Note where memory ran out, while everything that was in use still is."""
        node = torch._C._current_autograd_node() if self._graph_task >= 0 else None
        name = self._calls.names[self._calls.current(node) if module is None else module]
        self._log.keep_activations()
        name = name or "the model itself, or its loss"
        self.failure = Failure(operator, PHASES[self._log.phase], name, len(self._log.times) - 1)

    def _add(self, storage: Any, size: int, guess: str, part: int, *, birth: int, outside: bool) -> None:
        node = torch._C._current_autograd_node() if self._graph_task >= 0 else None
        number = -1 if node is None else sequence_number(node)
        module = self._calls.current(node)
        self._log.add(storage, size, guess, part, birth=birth, outside=outside, module=module, node=number)

    def _rounded(self, size: int, device_type: str) -> int:
        return -(-size // _CUDA_ROUND) * _CUDA_ROUND if device_type == "cuda" else size

    # -- what storages turn out to be ---------------------------------------------------------------------------------

    def _preexisting(self, tensor: Tensor, part: str, birth: int = 0) -> None:
        """Count a storage that no operator has shown, unless it is known: in use since ``birth``."""
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            size = self._rounded(storage.nbytes(), plain.device.type)
            if size and storage._cdata not in self._log.living:
                self._add(storage, size, part, CODE[part], birth=birth, outside=False)

    def _mark(self, tensor: Tensor, part: str) -> None:
        for plain in plain_tensors(tensor):
            allocation = self._log.living.get(plain.untyped_storage()._cdata)
            if allocation is not None:
                self._log.parts[allocation] = CODE[part]

    def _mark_gradient(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._mark(gradient, GRADIENTS)

    def _mark_accumulated(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._mark(parameter.grad, GRADIENTS)

    def _mark_states(self, *, existed: bool = False) -> None:
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for tensor in tensors_in(state):
                    if existed:
                        self._preexisting(tensor, OPTIMIZER_STATES)
                    self._mark(tensor, OPTIMIZER_STATES)

    def _update_begins(self, *_: Any) -> None:
        self._updating += 1

    def _update_ends(self, *_: Any) -> None:
        self._updating -= 1
        self._mark_states()

    def _update(
        self, original: Callable[..., Any], optimizer: Optimizer, param: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """In place of an optimizer's ``update``: follow the first of each shape, count the others alike."""
        kind = (id(optimizer), tuple(param.shape), param.dtype, bool(optimizer.state.get(param)))
        known = self._update_peaks.get(kind)
        self._updating += 1
        try:
            if known is None or self._every_update or _get_current_dispatch_mode() is not self:
                first = len(self._log)
                result = original(param, *args, **kwargs)
                self._update_peaks[kind] = self._log.peak_of_passing(first)
            else:
                with _pop_mode_temporarily():
                    result = original(param, *args, **kwargs)
                self.touch(UPDATE, known)
                for tensor in tensors_in(optimizer.state.get(param, {})):
                    self._preexisting(tensor, OPTIMIZER_STATES, birth=self._log.event())
        finally:
            self._updating -= 1
        return result

    def _update_in_tiles(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._updating += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._updating -= 1

    def adopt(self, model: nn.Module) -> None:
        """Count the tensors of a model that was made or read while tracking as weights."""
        for tensor in [*model.parameters(), *model.buffers()]:
            self._preexisting(tensor, WEIGHTS, birth=self._log.event())
            self._mark(tensor, WEIGHTS)

    # -- by hand ------------------------------------------------------------------------------------------------------

    def hold(self, part: str, size: int) -> None:
        """Count ``size`` bytes as ``part`` from the very beginning: something a simulated step does not allocate."""
        self._by_hand(part, size, birth=0, death=-1)

    def touch(self, part: str, size: int) -> None:
        """Count ``size`` bytes as ``part`` for this moment only."""
        birth = self._log.event()
        self._by_hand(part, size, birth=birth, death=self._log.event())

    def _by_hand(self, part: str, size: int, birth: int, death: int) -> None:
        self._log.by_hand(size, part, birth=birth, death=death, module=self._calls.current())
        self._check_budget(size, part, "an update")
        if death >= 0:
            self._log.live -= size

    # -- results ------------------------------------------------------------------------------------------------------

    def timeline(self) -> MemoryTimeline:
        """What was seen so far, by part."""
        return self._log.timeline(self._forward_ends)

    def modules(self, timeline: MemoryTimeline) -> list[ModuleRow]:
        """What each module of the model holds, has saved when backward begins, and has in use at the peak."""
        if self._model is None:
            return []
        log = self._log
        columns = (log.births, log.deaths, log.sizes, log.known_parts(), log.modules)
        return module_rows(self._model, self._optimizers, self._calls.names, timeline, columns)

    @property
    def peak_temporary_bytes(self) -> int:
        """The most bytes in use at once by storages that were allocated inside the block and freed inside it."""
        return self._log.peak_of_passing(self._inside)

    @property
    def kept_bytes(self) -> int:
        """Bytes allocated inside the block and still in use at its end."""
        return sum(self._log.made_from(self._inside, kept=True))

    @property
    def largest_allocation_bytes(self) -> int:
        """The largest single storage allocated inside the block."""
        return max(self._log.made_from(self._inside), default=0)


@contextmanager
def track(
    model: nn.Module | None = None, optimizers: Optimizer | Sequence[Optimizer] = (), *, vocabulary: int | None = None
) -> Iterator[MemoryTracker]:
    """``with track() as t: ...``: a `MemoryTracker` around a block. See there for the arguments and the limits.

    >>> weight = torch.ones(1000)
    >>> with track() as t:
    ...     weight.copy_((weight * 2).sqrt())
    tensor([1.4142, ...
    >>> t.peak_temporary_bytes, t.largest_allocation_bytes
    (8000, 4000)
    """
    with MemoryTracker(model, optimizers, vocabulary=vocabulary) as tracker:
        yield tracker


class _Watching:
    """A hook that only looks at a gradient: a fused backward may do without that gradient, which then is None
    (backward/heads.py)."""

    only_watches = True

    def __init__(self, look: Callable[[Tensor], None]) -> None:
        self._look = look

    def __call__(self, tensor: Tensor) -> None:
        self._look(tensor)


def _output_embedding(model: nn.Module | None) -> Tensor | None:
    """The weight, (vocabulary, hidden), of a transformers-style model's head; None where the model has no such
    thing."""
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    weight = getattr(head, "weight", None)
    return weight if isinstance(weight, Tensor) else None
