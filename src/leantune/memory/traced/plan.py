"""What a run will need, by part, known before it trains: `plan_run`.

Weights and states are counted, the update's temporaries are tried, and everything that forward and backward allocate
comes from walking one step on fake tensors (`leantune.memory.traced.trace`). A figure here is bytes of tensors; what
the process needs beside them is in `Plan.process_bytes` where it can be read. Every figure is for one batch size and
one length.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leantune.errors import InvalidArgumentError
from leantune.memory.measured.process import process_peak
from leantune.memory.measured.timeline import MemoryTimeline
from leantune.memory.measured.tracker import tensors_in
from leantune.memory.parts import LABELS, PARTS
from leantune.memory.plan_file import write_plan
from leantune.memory.quantised import scales
from leantune.memory.sizes import format_bytes
from leantune.memory.traced.trace import (
    Clip,
    LossFunction,
    TracedStep,
    exact_loss,
    full_logits_loss,
    token_batch,
    trace_step,
)
from leantune.memory.traced.update_cost import UpdateCost, update_cost


@dataclass(frozen=True)
class Plan:
    """Bytes a training step is going to use, by part, for one batch size and one length."""

    batch_size: int
    """Sequences in a micro-batch."""
    length: int
    """Tokens in a sequence."""
    micro_batches: int
    """Micro-batches in a step (gradient accumulation)."""
    fused: bool
    clip: str
    loss: str
    """"exact" (no logits), "full_logits", or the name of the function that was given."""
    parts: dict[str, int]
    """The most bytes each part uses on its own, whenever that is; they add up to more than `total`."""
    at_peak: dict[str, int]
    """Bytes of each part at the moment of the largest total; they add up to `total`."""
    saved: dict[str, int]
    """Bytes of each part when backward begins: "activations" and "loss" are what forward keeps for it."""
    total: int
    """The most bytes of tensors in use at once."""
    process_bytes: int | None
    """Resident bytes that are no tensors of this model (interpreter, libraries) while planning; None: unknown."""
    dtypes: dict[str, dict[str, int]]
    """For weights and gradients: bytes of each dtype."""
    notes: tuple[str, ...]
    """What is left out or assumed, in words."""
    seconds: float
    """Time the planning took."""

    @property
    def where(self) -> str:
        """Batch and length, as every figure of this plan must be read.

        Example: "2 x 512 tokens, 4 micro-batches a step"
        """
        text = f"{self.batch_size} x {self.length} tokens"
        return text if self.micro_batches == 1 else f"{text}, {self.micro_batches} micro-batches a step"

    def rows(self) -> list[tuple[str, str, str]]:
        """(part, bytes at the peak, the part's own largest) as text, without parts that use nothing; the total last."""
        used = [part for part in PARTS if self.parts[part] > 0]
        rows = [(LABELS[part], format_bytes(self.at_peak[part]), format_bytes(self.parts[part])) for part in used]
        return [*rows, ("total", format_bytes(self.total), "")]

    def table(self) -> str:
        """The plan as a text table with its notes."""
        title = f"planned memory at {self.where} (loss: {self.loss}, fused backward: {'yes' if self.fused else 'no'})"
        lines = [title, *_columns([("part", "at the peak", "part's own peak"), *self.rows()])]
        if self.process_bytes is not None:
            lines.append(
                f"beside tensors: {format_bytes(self.process_bytes)} of interpreter and libraries (resident now)"
            )
        lines.extend(f"note: {note}" for note in self.notes)
        return "\n".join(lines)

    def compare(self, measured: MemoryTimeline) -> list[tuple[str, str, str, str]]:
        """(part, planned, measured, difference) of each part's own peak as text, the total's last."""
        found = measured.part_peaks()
        rows = [
            (
                LABELS[part],
                format_bytes(self.parts[part]),
                format_bytes(found[part]),
                _percent(found[part], self.parts[part]),
            )
            for part in PARTS
            if self.parts[part] or found[part]
        ]
        peak = measured.peak_bytes
        return [*rows, ("total", format_bytes(self.total), format_bytes(peak), _percent(peak, self.total))]

    def to_dict(self) -> dict[str, Any]:
        """Everything, JSON-ready."""
        return asdict(self) | {"notes": list(self.notes)}

    def to_json(self) -> str:
        """Everything, as indented JSON: the text of ``memory_plan.json``."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def save(self, path: str | Path) -> Path:
        """Write `to_json` to ``path`` (a file, or a folder that gets ``memory_plan.json``); returns the file."""
        return write_plan(self.to_json(), path)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read what `save` wrote."""
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**{**values, "notes": tuple(values["notes"])})


def plan_run(
    model: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    *,
    batch_size: int,
    length: int,
    fused: bool,
    clip: Clip = "per_tensor",
    loss: Literal["exact", "full_logits"] | LossFunction = "exact",
    micro_batches: int = 1,
    accumulate: str | None = None,
    padded: bool = False,
    autocast: torch.dtype | None = None,
    batch: Mapping[str, Tensor] | None = None,
) -> Plan:
    """Plan the memory of a steady training step, without running one and without touching the model.

    Args:
        model: the model as it will train: dtypes, frozen parameters, gradient checkpointing and VeLoRA already in
            place. On any device; its weights are not copied and, when this returns, not changed.
        optimizers: the optimizer or optimizers that will step it.
        batch_size, length: sequences in a micro-batch, tokens in a sequence: every figure is for these.
        fused: `FusedBackward` applies and frees gradients inside backward.
        clip: its clip mode; "global" walks backward twice over one forward. Without ``fused`` it changes nothing.
        loss: "exact" (`linear_cross_entropy`, no logits), "full_logits" (the model's own), or a function
            (model, batch) -> scalar loss: the one that will train. It is called with fake tensors.
        micro_batches: gradient accumulation.
        accumulate: what sums gradients meanwhile under ``fused``: "float32" or "bfloat16", as FusedBackward has it.
        padded: batches hold padding or several packed sequences, so attention masks exist.
        autocast: dtype of autocast, None for none.
        batch: a batch to take shapes and dtypes from, in place of ``input_ids`` and ``labels`` of batch_size x length.

    Raises: InvalidArgumentError for sizes under 1, a model without parameters, or a model that cannot be walked on fake
        tensors (its Python code looks at values); the message holds the reason.

    >>> from torch.optim import SGD
    >>> model = nn.Linear(64, 64, bias=False)
    >>> square = lambda model, batch: model(batch["x"]).square().sum()
    >>> plan = plan_run(model, SGD(model.parameters(), lr=0.1), batch_size=8, length=1, fused=False, loss=square,
    ...                 batch={"x": torch.zeros(8, 64)})
    >>> plan.parts["weights"], plan.parts["gradients"], plan.parts["optimizer_states"]
    (16384, 16384, 0)
    """
    began = time.perf_counter()
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    first = _check(model, batch_size, length, micro_batches)
    function, name = _loss_function(loss)
    cost = update_cost(optimizers)
    if batch is None:
        batch = token_batch(batch_size, length, first.device, padded=padded)
    step = TracedStep(
        loss=function,
        batch=batch,
        updated=_trained_by(optimizers),
        in_tiles=_trained_by(optimizer for optimizer in optimizers if getattr(optimizer, "tileable", False)),
        fused=fused,
        two_passes=fused and clip == "global",
        micro_batches=micro_batches,
        accumulate=accumulate if fused else None,
        padded=padded,
        autocast=autocast,
        cost=cost,
    )
    try:
        timeline = trace_step(model, step)
    except Exception as error:
        raise InvalidArgumentError(
            f"{type(model).__name__} with loss={name!r} could not be walked on fake tensors: "
            f"{type(error).__name__}: {error}. Code that looks at tensors' values cannot be planned; train without a "
            "plan, or pass a loss function that does not"
        ) from error
    return Plan(
        batch_size=batch_size,
        length=length,
        micro_batches=micro_batches,
        fused=fused,
        clip=clip if fused else "none",
        loss=name,
        parts=timeline.part_peaks(),
        at_peak=timeline.at_peak(),
        saved=timeline.saved_at_forward_end(),
        total=timeline.peak_bytes,
        process_bytes=_process_bytes(model, optimizers, first.device),
        dtypes=_dtypes(model),
        notes=tuple(_notes(model, optimizers, cost, padded, fused)),
        seconds=round(time.perf_counter() - began, 3),
    )


def _trained_by(optimizers: Iterable[torch.optim.Optimizer]) -> frozenset[int]:
    """ids of their parameters."""
    return frozenset(id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])


def _check(model: nn.Module, batch_size: int, length: int, micro_batches: int) -> Tensor:
    for name, value in (("batch_size", batch_size), ("length", length), ("micro_batches", micro_batches)):
        if value < 1:
            raise InvalidArgumentError(f"{name} is {value}; a plan needs at least 1")
    first = next(model.parameters(), None)
    if first is None:
        raise InvalidArgumentError(f"{type(model).__name__} has no parameters, so there is nothing to train or to plan")
    return first


def _loss_function(loss: str | LossFunction) -> tuple[LossFunction, str]:
    if callable(loss):
        return loss, getattr(loss, "__name__", type(loss).__name__)
    known: dict[str, LossFunction] = {"exact": exact_loss, "full_logits": full_logits_loss}
    if loss not in known:
        raise InvalidArgumentError(
            f'loss is {loss!r}; it is "exact" (no logits), "full_logits", or a function (model, batch) -> loss'
        )
    return known[loss], loss


def _dtypes(model: nn.Module) -> dict[str, dict[str, int]]:
    weights: Counter[str] = Counter()
    gradients: Counter[str] = Counter()
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        size = parameter.numel() * parameter.element_size()
        weights[name] += size
        if parameter.requires_grad:
            gradients[name] += size
    return {"weights": dict(weights), "gradients": dict(gradients)}


def _process_bytes(model: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> int | None:
    """Resident bytes beside this model's tensors: too few where weights are still unread from a mapped file."""
    if device.type != "cpu":
        return None
    tensors = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in model.parameters()}
    beside = [*model.buffers(), *scales(model)]
    tensors.update({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in beside})
    for optimizer in optimizers:
        for tensor in tensors_in(list(optimizer.state.values())):
            tensors[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return max(0, process_peak().current - sum(tensors.values()))


def _notes(model: nn.Module, optimizers: Sequence[Optimizer], cost: UpdateCost, padded: bool, fused: bool) -> list[str]:
    notes = list(cost.notes)
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    orphans = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in stepped]
    if orphans:
        notes.append(
            f"{len(orphans)} trainable parameters belong to no optimizer ({', '.join(orphans[:3])}"
            f"{'...' if len(orphans) > 3 else ''}): their gradients stay in memory"
        )
    if not padded:
        notes.append(
            "no attention mask: batches with padding or packed sequences keep one beside this (plan with padded=True)"
        )
    if fused:
        notes.append("the first step needs less: optimizer states are allocated at each parameter's first update")
    notes.append(
        "scratch memory inside kernels (matrix products, attention) and allocator slack are not tensors: not included"
    )
    return notes


def _percent(found: int, planned: int) -> str:
    if planned == 0:
        return "not planned" if found else "0.0 %"
    return f"{100 * (found - planned) / planned:+.1f} %"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]
