"""The stages of a run in which memory differs, what each was found to need, and plan and measurement side by side."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from leantune.memory.parts import PARTS

LOAD = "load"
FORWARD_STAGE = "forward"
BACKWARD_STAGE = "backward"
FIRST_STEP = "first step"
STEP = "steady step"
EVALUATION = "evaluation"
SAVE = "save"
RESUME = "resume"

STAGES = (LOAD, FORWARD_STAGE, BACKWARD_STAGE, FIRST_STEP, STEP, EVALUATION, SAVE, RESUME)
"""Every stage, in the order of a run."""

STAGE_LABELS = {
    LOAD: "load the model",
    FORWARD_STAGE: "forward",
    BACKWARD_STAGE: "backward",
    FIRST_STEP: "first step",
    STEP: "steady step",
    EVALUATION: "evaluation",
    SAVE: "save a checkpoint",
    RESUME: "resume from it",
}
"""What a reader sees. "forward" and "backward" are the peaks of the two within a steady step."""

TOTAL = "total"
"""Beside the parts, in a `StageRow`."""


@dataclass(frozen=True)
class StageMeasurement:
    """What one stage was found to use."""

    stage: str
    parts: dict[str, int]
    """Bytes of tensors of each part at the stage's peak: they add up to `peak_bytes`."""
    outside_bytes: int | None = None
    """The stage's peak as seen from outside, above what was in use before the model was loaded: resident bytes of the
    process on a CPU, the allocator's on a GPU. None: not measured."""
    seconds: float = 0.0
    """Time it took, while being tracked."""
    part_peaks: dict[str, int] = field(default_factory=dict)
    """The most bytes each part uses on its own."""

    @property
    def peak_bytes(self) -> int:
        """Bytes of all tensors at the peak."""
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"peak_bytes": self.peak_bytes}


@dataclass(frozen=True)
class StageRow:
    """One part (or `TOTAL`) in one stage; bytes, None where it was not planned or not measured."""

    stage: str
    part: str
    planned: int | None
    measured: int | None

    @property
    def error(self) -> float | None:
        """(planned - measured) / measured; None where one of them is missing or nothing was measured.

        >>> StageRow("steady step", "total", 103, 100).error
        0.03
        """
        if self.planned is None or not self.measured:
            return None
        return (self.planned - self.measured) / self.measured

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"error": self.error}


Planned = Mapping[str, Mapping[str, int]]
"""{stage: {part or "total": bytes}}; parts as large as at the stage's peak."""


def stage_rows(planned: Planned, measured: Sequence[StageMeasurement]) -> list[StageRow]:
    """Plan and measurement side by side: for each stage its parts at its peak, then the total."""
    found = {stage.stage: stage for stage in measured}
    rows: list[StageRow] = []
    for stage in STAGES:
        plan, got = planned.get(stage), found.get(stage)
        if plan is None and got is None:
            continue
        peaks = None if got is None else {**got.parts, TOTAL: got.peak_bytes}
        rows.extend(_rows_of(stage, plan, peaks))
    return rows


def _rows_of(stage: str, plan: Mapping[str, int] | None, peaks: Mapping[str, int] | None) -> Iterable[StageRow]:
    for part in (*PARTS, TOTAL):
        row = StageRow(
            stage, part, None if plan is None else plan.get(part), None if peaks is None else peaks.get(part)
        )
        if row.planned or row.measured:
            yield row
