"""What each module costs over a tracked step, with the layers of a stack taken together."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import nn
from torch.optim import Optimizer

from leantune.memory.measured.storages import tensors_in
from leantune.memory.measured.timeline import MemoryTimeline
from leantune.memory.parts import OPTIMIZER_STATES, PARTS, WEIGHTS

_HELD = [PARTS.index(WEIGHTS), PARTS.index(OPTIMIZER_STATES)]


@dataclass(frozen=True)
class ModuleRow:
    """Modules of one name, layer numbers aside ("model.layers.*.mlp.down_proj"); bytes of all of them together."""

    name: str
    """"" is the model itself with what runs outside its modules: the loss, updates."""
    count: int
    weights: int
    """Parameters and buffers of the module itself, not of those inside it."""
    states: int
    """Optimizer states of those parameters."""
    saved: int
    """Made by its forward and still in use when backward begins."""
    at_peak: int
    """In use at the step's peak beside weights and states: gradients, activations, temporaries that it made."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def module_rows(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    names: Sequence[str],
    timeline: MemoryTimeline,
    columns: tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], Sequence[int]],
) -> list[ModuleRow]:
    """Rows of all modules that cost something, the largest first.

    Args:
        model, optimizers: as tracked.
        names: of modules, by the index in the last of the columns.
        timeline: of the tracked step.
        columns: births, deaths, sizes, parts and modules of every allocation (see `resolve`).
    """
    births, deaths, sizes, parts, modules = (np.asarray(column, dtype=np.int64) for column in columns)
    passing = ~np.isin(parts, _HELD)

    def made(event: int) -> dict[int, int]:
        """Bytes in use after ``event`` by the module that made them."""
        alive = passing & (births <= event) & ((deaths < 0) | (deaths > event))
        return dict(enumerate(np.bincount(modules[alive], weights=sizes[alive]).astype(np.int64).tolist()))

    saved = made(timeline.forward_end) if timeline.forward_ends else {}
    peak = made(timeline.peak_event)
    found: dict[str, list[int]] = {}
    counted: set[int] = set()
    inside = dict(model.named_modules())
    for index, name in enumerate(names):
        weights, states = _held_by(inside.get(name), optimizers, counted)
        row = found.setdefault(re.sub(r"\.\d+(?=\.|$)", ".*", name), [0, 0, 0, 0, 0])
        for place, value in enumerate((1, weights, states, saved.get(index, 0), peak.get(index, 0))):
            row[place] += value
    rows = [ModuleRow(name, *values) for name, values in found.items() if any(values[1:])]
    return sorted(rows, key=lambda row: -(row.weights + row.states + max(row.saved, row.at_peak)))


def _held_by(module: nn.Module | None, optimizers: Sequence[Optimizer], counted: set[int]) -> tuple[int, int]:
    """Bytes of a module's own tensors and of their states; a tied one counts where it is met first."""
    weights = states = 0
    if module is None:
        return 0, 0
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        if id(tensor) in counted:
            continue
        counted.add(id(tensor))
        weights += tensor.numel() * tensor.element_size()
        for optimizer in optimizers:
            states += sum(t.numel() * t.element_size() for t in tensors_in(optimizer.state.get(tensor, {})))
    return weights, states
