"""One training step run on fake tensors: every shape is real, no byte is allocated, and a tracker counts it all.

The model's parameters and buffers are replaced by fake ones for the length of the trace and put back exactly; nothing
is copied, so a 7B model is traced in the memory of its operators' bookkeeping. Because the step is really walked
(forward, backward, recomputation inside gradient checkpointing, custom autograd functions), what a plan says about
activations needs no formula for any architecture.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from leantune.backward.accumulation import Accumulator
from leantune.backward.graph import head_nodes
from leantune.errors import InvalidArgumentError
from leantune.memory.measured.timeline import MemoryTimeline
from leantune.memory.measured.tracker import MemoryTracker
from leantune.memory.parts import OPTIMIZER_STATES, UPDATE
from leantune.memory.quantised import fake_scales
from leantune.memory.traced.update_cost import UpdateCost
from leantune.optim.gradient import NORM_CHUNK, TiledGradient, Walk

Clip = Literal["per_tensor", "global", "none"]
LossFunction = Callable[[nn.Module, dict[str, Tensor]], Tensor]
"""(model, batch) -> scalar loss: what one micro-batch of training computes."""


@dataclass(frozen=True)
class TracedStep:
    """What `trace_step` is to walk through."""

    loss: LossFunction
    batch: Mapping[str, Tensor]
    """Real tensors: their shapes and dtypes are used, and their device where the model is on the meta device."""
    updated: frozenset[int]
    """ids of the parameters that an optimizer updates."""
    in_tiles: frozenset[int]
    """ids of those that a fused backward may update in tiles where they are output heads (`FusedBackward`'s head)."""
    fused: bool
    """Gradients are applied and freed inside backward."""
    two_passes: bool
    """Fused with an exact global clip: one backward for the norm, one for the update."""
    micro_batches: int
    """Micro-batches per step, at most 2 of which are walked (the third looks like the second)."""
    accumulate: str | None
    """What sums gradients over micro-batches under a fused backward (`Accumulator`)."""
    autocast: torch.dtype | None
    padded: bool
    """Attention masks exist: batches hold padding or packed sequences."""
    cost: UpdateCost
    """States, in use from the beginning (a steady step), and what updates allocate for a moment."""


def trace_step(model: nn.Module, step: TracedStep) -> MemoryTimeline:
    """Walk one step on fake tensors and return its memory by part.

    Raises: whatever the model raises on tensors without data, e.g. ``DataDependentOutputException`` where Python
    control flow depends on values.
    """
    rng = torch.get_rng_state()
    try:
        with (
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            _fake_parameters(model, mode, next(iter(step.batch.values())).device) as real_of,
            _unpacked(step.padded),
        ):
            tracker = MemoryTracker(model)
            batch: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in step.batch.items()}
            hooks = _gradient_hooks(model, real_of, step, tracker)
            with tracker:
                tracker.hold(OPTIMIZER_STATES, step.cost.state_bytes)
                _walk(model, batch, real_of, step, tracker, hooks)
            hooks.remove()
            return tracker.timeline()
    finally:
        torch.set_rng_state(rng)


def _walk(
    model: nn.Module,
    batch: dict[str, Tensor],
    real_of: Mapping[int, int],
    step: TracedStep,
    tracker: MemoryTracker,
    hooks: "_GradientHooks",
) -> None:
    micro_batches = min(2, step.micro_batches)
    device_type = next(iter(batch.values())).device.type
    for micro_batch in range(micro_batches):
        last = micro_batch == micro_batches - 1
        context = torch.autocast(device_type, dtype=step.autocast) if step.autocast is not None else nullcontext()
        with torch.enable_grad(), context:
            loss = step.loss(model, batch)
        if hooks.sums is not None and step.micro_batches > 1:
            hooks.action = "gather"
        else:
            if step.fused and last:
                _take_heads(loss, real_of, step, tracker, hooks)
            if step.two_passes and last:
                hooks.action = "drop"
                loss.backward(retain_graph=True)
            hooks.action = "update" if step.fused and last else "keep"
        loss.backward()
        del loss
    hooks.apply_sums(real_of, step, tracker)
    if not step.fused:
        tracker.touch(UPDATE, step.cost.whole_step)
    for parameter in model.parameters():
        if id(parameter) in real_of:
            parameter.grad = None


def _take_heads(
    loss: Tensor, real_of: Mapping[int, int], step: TracedStep, tracker: MemoryTracker, hooks: "_GradientHooks"
) -> None:
    """Heads whose gradients a fused backward takes in tiles (leantune/backward/heads.py): walked over, never whole."""

    def take(head: Tensor, real: int, walk: Walk) -> None:
        rows, cols = head.shape
        gradient = TiledGradient((rows, cols), torch.float32, head.device, walk)
        if hooks.action == "drop" or not step.two_passes:
            for _ in gradient.pieces(NORM_CHUNK):
                pass
        if hooks.action == "update":
            for _ in gradient.tiles(column_unit=128):
                tracker.touch(UPDATE, step.cost.temporaries.get(real, 0))

    for node, alone in head_nodes(loss):
        real = real_of.get(id(node.head))
        if alone and real in step.in_tiles:
            node.taker = functools.partial(take, node.head, real)


class _GradientHooks:
    """Post-accumulate hooks on fake parameters that do to gradients what the planned run will do."""

    def __init__(self, accumulate: str | None) -> None:
        self.action: Literal["keep", "gather", "drop", "update"] = "keep"
        self.handles: list[Any] = []
        self.sums = None if accumulate is None else Accumulator(accumulate)

    def apply_sums(self, real_of: Mapping[int, int], step: TracedStep, tracker: MemoryTracker) -> None:
        """As FusedBackward does after the last micro-batch: update by one sum after the other, and free it."""
        sums = self.sums.sums if self.sums is not None else {}
        for parameter in list(sums):
            tracker.touch(UPDATE, step.cost.temporaries.get(real_of[id(parameter)], 0))
            del sums[parameter]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def _gradient_hooks(
    model: nn.Module, real_of: Mapping[int, int], step: TracedStep, tracker: MemoryTracker
) -> _GradientHooks:
    hooks = _GradientHooks(step.accumulate)

    def ready(parameter: Tensor) -> None:
        if hooks.action == "keep":
            return
        if hooks.action == "gather" and hooks.sums is not None and parameter.grad is not None:
            with torch.no_grad():
                hooks.sums.add(parameter, parameter.grad, 0)
        if hooks.action == "update":
            tracker.touch(UPDATE, step.cost.temporaries.get(real_of[id(parameter)], 0))
        parameter.grad = None

    for parameter in model.parameters():
        real = real_of.get(id(parameter))
        if parameter.requires_grad and real in step.updated:
            hooks.handles.append(parameter.register_post_accumulate_grad_hook(ready))
    return hooks


@contextmanager
def _fake_parameters(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[dict[int, int]]:
    """Put fake tensors in place of the model's, and its modules in training mode; undo it at the end.

    Tensors of the meta device become fake ones of ``device``, the batch's: operators choose their kernels by device,
    and the meta device's attention keeps squares that no other device's does.

    Yields {id of a fake parameter: id of the real one}. Whatever modules write into their own attributes meanwhile
    (flags, caches, buffers) is undone as well. Tied parameters stay tied.
    """
    modules = list({id(module): module for module in model.modules()}.values())
    saved = [(m, dict(m.__dict__), dict(m._parameters), dict(m._buffers)) for m in modules]
    gradients: dict[int, tuple[nn.Parameter, Tensor | None]] = {}
    fakes: dict[int, Any] = {}
    real_of: dict[int, int] = {}
    try:
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in fakes:
                    gradients[id(parameter)] = (parameter, parameter.grad)
                    parameter.grad = None
                    fakes[id(parameter)] = _fake_parameter(parameter, mode, device)
                    real_of[id(fakes[id(parameter)])] = id(parameter)
                module._parameters[name] = fakes[id(parameter)]
                fake_scales(module, fakes[id(parameter)], parameter, functools.partial(_fake, mode=mode, device=device))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    fakes.setdefault(id(buffer), _fake(buffer, mode, device))
                    module._buffers[name] = fakes[id(buffer)]
            module.training = True
        yield real_of
    finally:
        for module, attributes, parameters, buffers in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)
        for parameter, gradient in gradients.values():
            parameter.grad = gradient


def _fake_parameter(parameter: nn.Parameter, mode: FakeTensorMode, device: torch.device) -> nn.Parameter:
    return nn.Parameter(_fake(parameter.detach(), mode, device), requires_grad=parameter.requires_grad)


def _fake(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    with torch.no_grad():
        if tensor.is_meta:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        fake: Tensor = mode.from_tensor(tensor)
        return fake


@contextmanager
def _unpacked(padded: bool) -> Iterator[None]:
    """Let transformers take positions for those of one unbroken sequence, unless masks are wanted.

    It looks at position ids to see whether sequences are packed; fake ones have no values, and it then makes a mask to
    be on the safe side, which a real batch without packing does not get.
    """
    masking = sys.modules.get("transformers.masking_utils")
    original = getattr(masking, "find_packed_sequence_indices", None)
    if padded or masking is None or original is None:
        yield
        return
    masking.find_packed_sequence_indices = lambda position_ids: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = original  # type: ignore[attr-defined]


def token_batch(batch_size: int, length: int, device: torch.device, *, padded: bool = False) -> dict[str, Tensor]:
    """{"input_ids", "labels"} and, where ``padded``, {"attention_mask"}: int64 (batch_size, length) each."""
    tokens = torch.zeros((batch_size, length), dtype=torch.int64, device=device)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    return batch | {"attention_mask": torch.ones_like(tokens)} if padded else batch


def full_logits_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss a transformers causal language model computes itself, logits and all."""
    loss: Tensor = model(**batch, use_cache=False).loss
    return loss


def exact_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """`linear_cross_entropy` on the decoder's hidden states: (batch, length, hidden) and the head's weight, no logits.

    Labels are shifted inside: position i is scored against token i + 1; -100 is ignored.
    """
    from leantune.activations.loss import linear_cross_entropy, shift_labels

    decoder, head = decoder_and_head(model)
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    hidden = decoder(**inputs, use_cache=False).last_hidden_state
    return linear_cross_entropy(hidden, head.weight, shift_labels(batch["labels"]), bias=getattr(head, "bias", None))


def decoder_and_head(model: nn.Module) -> tuple[nn.Module, nn.Linear]:
    """The part of a causal language model that makes hidden states, and the linear layer that makes logits of them.
    Adapters' wrapper (PEFT's) around the model is looked through: its layers hold their adapters."""
    unwrap = getattr(model, "get_base_model", None)
    model = unwrap() if callable(unwrap) else model
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    decoder = next(
        (
            candidate
            for name in (getattr(model, "base_model_prefix", ""), "model", "transformer")
            if name and isinstance(candidate := getattr(model, name, None), nn.Module)
        ),
        None,
    )
    if decoder is None or not isinstance(head, nn.Linear):
        raise InvalidArgumentError(
            f'{type(model).__name__} has no decoder with a linear output embedding, so loss="exact" cannot run it; '
            " pass loss=a function (model, batch) -> loss"
        )
    return decoder, head
