"""The stages of a run, from loading to resuming, with the bytes of every part in each: on the device, the host and the
disk."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from leantune.memory.budget.gpus import CONTEXT_BYTES
from leantune.memory.budget.sharding import ALONE, Parallel, RankShare, rank_share
from leantune.memory.closed_form.model_shape import ModelShape
from leantune.memory.closed_form.settings import RunSettings
from leantune.memory.closed_form.step import walk_evaluation, walk_first_step, walk_step
from leantune.memory.closed_form.weights import WeightTable
from leantune.memory.measured.timeline import BACKWARD, FORWARD, PHASES, MemoryTimeline
from leantune.memory.parts import LABELS, OPTIMIZER_STATES, PARTS, WEIGHTS
from leantune.memory.reports.stages import (
    BACKWARD_STAGE,
    EVALUATION,
    FIRST_STEP,
    FORWARD_STAGE,
    LOAD,
    RESUME,
    SAVE,
    STEP,
)
from leantune.memory.sizes import GIB

ADAPTERS = "adapters"
COMMUNICATION = "communication"
CONTEXT = "context"
FRAGMENTATION = "fragmentation"
CALIBRATION = "calibration"
STAGE_PARTS = (
    WEIGHTS,
    ADAPTERS,
    *(part for part in PARTS if part != WEIGHTS),
    COMMUNICATION,
    CONTEXT,
    FRAGMENTATION,
    CALIBRATION,
)
"""Parts of a staged plan, in the order of tables."""
PART_LABELS = LABELS | {
    ADAPTERS: "adapters",
    COMMUNICATION: "communication",
    CONTEXT: "device context",
    FRAGMENTATION: "fragmentation",
    CALIBRATION: "calibration by a profile",
}
FRAGMENTED = 0.05
"""Share of what comes and goes that the allocator's gaps take: an assumption, replaced by a profile's calibration."""
LIBRARIES_BYTES = 3 * GIB // 2
"""Resident in a training process beside tensors: interpreter, torch, CUDA's libraries. An assumption."""


@dataclass(frozen=True)
class Stage:
    """One stage: bytes of each part at its largest total, and the host's."""

    name: str
    parts: Mapping[str, int]
    host: int

    @property
    def total(self) -> int:
        """Bytes on the device at the stage's peak."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class StagedBytes:
    """All stages of a run, and what it writes."""

    stages: tuple[Stage, ...]
    part_peaks: Mapping[str, int]
    """The most of each part in a steady step, whenever that is."""
    saved: Mapping[str, int]
    """Parts when backward begins."""
    checkpoint_bytes: int
    model_file_bytes: int

    @property
    def peak(self) -> Stage:
        """The stage that needs the most on the device."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def host_peak(self) -> Stage:
        """The stage that needs the most on the host."""
        return max(self.stages, key=lambda stage: stage.host)

    def disk_bytes(self, kept: int | None) -> int:
        """Bytes on disk with ``kept`` checkpoints, one more while it is written, and the model; None keeps all: two."""
        return ((2 if kept is None else kept) + 1) * self.checkpoint_bytes + self.model_file_bytes


def stage_bytes(shape: ModelShape, settings: RunSettings, parallel: Parallel = ALONE) -> StagedBytes:
    """Every stage by closed form, for the process that holds the most."""
    table = WeightTable(shape, settings)
    return _Stages(shape, settings, table, rank_share(shape, settings, table, parallel)).all()


def peak_stage(shape: ModelShape, settings: RunSettings, parallel: Parallel = ALONE) -> Stage:
    """Loading or a steady step, whichever needs more: as much as `stage_bytes(...).peak`, in a third of the time, since
    no other stage holds what neither of them does."""
    table = WeightTable(shape, settings)
    stages = _Stages(shape, settings, table, rank_share(shape, settings, table, parallel))
    return max(stages.largest(), key=lambda stage: stage.total)


def peak_bytes(shape: ModelShape, settings: RunSettings, parallel: Parallel = ALONE) -> int:
    """The total of `peak_stage`."""
    return peak_stage(shape, settings, parallel).total


def with_overhead(parts: Mapping[str, int], cuda: bool) -> dict[str, int]:
    """Parts with the device's own: a GPU's context, and gaps between what comes and goes."""
    out = {part: int(parts.get(part, 0)) for part in STAGE_PARTS}
    if cuda:
        moving = sum(out.values()) - out[WEIGHTS] - out[ADAPTERS] - out[OPTIMIZER_STATES]
        out[CONTEXT], out[FRAGMENTATION] = CONTEXT_BYTES, int(FRAGMENTED * moving)
    return out


class _Stages:
    def __init__(self, shape: ModelShape, settings: RunSettings, table: WeightTable, share: RankShare) -> None:
        self.settings, self.table, self.share = settings, table, share
        self.shape = shape
        self.step = walk_step(shape, settings, table)
        # A checkpoint holds what is trained; the frozen base stays where it is.
        self.model_file = table.adapter_bytes if settings.adapts else table.weight_bytes

    def all(self) -> StagedBytes:
        states = self.share.states
        total = self.step.total
        forward, backward = (self._within(phase, total) for phase in (FORWARD, BACKWARD))
        load, steady = self.largest()
        first = walk_first_step(self.shape, self.settings, self.table)
        still = {WEIGHTS: self.share.weights, ADAPTERS: self.share.adapters, OPTIMIZER_STATES: states}
        evaluation = walk_evaluation(self.shape, self.settings, self.table)
        stages = (
            load,
            self._stage(FORWARD_STAGE, self.step, forward, states),
            self._stage(BACKWARD_STAGE, self.step, backward, states),
            self._first(first),
            steady,
            self._stage(EVALUATION, evaluation, evaluation.peak_event, states),
            Stage(SAVE, self._overhead(still), self._saving()),
            Stage(RESUME, self._overhead(still), self._resuming()),
        )
        return StagedBytes(
            stages=stages,
            part_peaks=self._shared(self.step.part_peaks(), states),
            saved=self._shared(self.step.saved_at_forward_end(), states),
            checkpoint_bytes=self.model_file + self.table.state_bytes,
            model_file_bytes=self.model_file,
        )

    def largest(self) -> tuple[Stage, Stage]:
        """Load and a steady step: no other stage needs more than the larger of them."""
        states = self.share.states
        load = {WEIGHTS: self.share.weights, ADAPTERS: self.share.adapters}
        return (
            Stage(LOAD, self._overhead(load), self._loading()),
            self._stage(STEP, self.step, self.step.peak_event, states),
        )

    def _within(self, phase: str, total: np.ndarray) -> int:
        """The event of the largest total in a phase of the step; what comes after backward is not forward."""
        inside = np.flatnonzero(self.step.phases == PHASES.index(phase))
        if phase == FORWARD and len(backward := np.flatnonzero(self.step.phases == PHASES.index(BACKWARD))):
            inside = inside[inside < backward[-1]]
        return int(inside[np.argmax(total[inside])])

    def _stage(self, name: str, timeline: MemoryTimeline, event: int, states: int) -> Stage:
        return Stage(name, self._overhead(self._shared(timeline.at(event), states)), self._running())

    def _first(self, step: MemoryTimeline) -> Stage:
        """Its states appear on the way: this process's share of those that are there at the peak."""
        parts = step.at_peak()
        whole = self.table.state_bytes
        states = int(parts[OPTIMIZER_STATES] * self.share.states / whole) if whole else 0
        return Stage(FIRST_STEP, self._overhead(self._shared(parts, states)), self._running())

    def _shared(self, parts: Mapping[str, int], states: int) -> dict[str, int]:
        """A step's parts with this process's share of weights, states and what is communicated."""
        share = self.share
        out = {**parts, WEIGHTS: share.weights, ADAPTERS: share.adapters, OPTIMIZER_STATES: states}
        if not self.settings.fused and self.table.gradient_bytes:
            out["gradients"] = int(parts["gradients"] * share.gradients / self.table.gradient_bytes)
        return out | {COMMUNICATION: share.communication}

    def _overhead(self, parts: Mapping[str, int]) -> dict[str, int]:
        return with_overhead(parts, self.settings.cuda)

    # -- the host -----------------------------------------------------------------------------------------------------

    def _running(self) -> int:
        """On a CPU the model's tensors are the device's, counted there."""
        return LIBRARIES_BYTES

    def _loading(self) -> int:
        """transformers makes the model on the host, then moves it."""
        return LIBRARIES_BYTES + (self.table.weight_bytes if self.settings.cuda else 0)

    def _saving(self) -> int:
        """The weights as bytes for their file, then the largest state."""
        largest = max((w.elements for w in self.table.values() if w.trained), default=0)
        return LIBRARIES_BYTES + max(self.model_file, 8 * largest)

    def _resuming(self) -> int:
        """optimizer.pt is read onto the host whole before it is copied to the device, after the weights."""
        return LIBRARIES_BYTES + max(self._loading() - LIBRARIES_BYTES, self.table.state_bytes)
