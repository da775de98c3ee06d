"""What a profile found: every stage measured, plan beside it, where it went; read and written as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from leantune.memory.measured.modules import ModuleRow
from leantune.memory.measured.timeline import MemoryTimeline
from leantune.memory.parts import LABELS
from leantune.memory.reports.shortage import MemoryShortage
from leantune.memory.reports.stages import STAGE_LABELS, STEP, TOTAL, StageMeasurement, StageRow
from leantune.memory.sizes import format_bytes
from leantune.whole_file import write_whole

PROFILE_FILE = "memory_profile.json"
FITS, OUT_OF_MEMORY = "fits", "out of memory"


@dataclass(frozen=True)
class MemoryProfile:
    """A profiled run. Bytes; every figure is for the batch and length in `run`."""

    run: dict[str, str]
    """What was run, for the reader: model, method, dtypes, "where" (batch x length)..."""
    machine: dict[str, Any]
    versions: dict[str, str]
    budget: int | None
    stages: tuple[StageMeasurement, ...]
    rows: tuple[StageRow, ...]
    timeline: MemoryTimeline | None
    """Of the steady step, or of the stage in which memory ran out."""
    modules: tuple[ModuleRow, ...]
    advice: tuple[str, ...]
    notes: tuple[str, ...]
    tokens_per_second: float | None = None
    """Of a step that was not tracked."""
    shortage: MemoryShortage | None = None
    allocator: dict[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """`FITS` or `OUT_OF_MEMORY`."""
        return FITS if self.shortage is None else OUT_OF_MEMORY

    @property
    def peak(self) -> StageMeasurement | None:
        """The measured stage with the most tensors in use; None where none was completed."""
        return max(self.stages, key=lambda stage: stage.peak_bytes, default=None)

    @property
    def planned_step(self) -> int | None:
        """Bytes planned for the peak of a steady step."""
        return next((row.planned for row in self.rows if (row.stage, row.part) == (STEP, TOTAL)), None)

    def stage(self, name: str) -> StageMeasurement | None:
        """The measurement of a stage, if it was made."""
        return next((stage for stage in self.stages if stage.stage == name), None)

    def table(self) -> list[tuple[str, str, str, str]]:
        """(stage, planned, measured, difference) of the totals, as text."""
        return [
            (STAGE_LABELS[row.stage], _text(row.planned), _text(row.measured), difference(row))
            for row in self.rows
            if row.part == TOTAL
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        shortage = None if self.shortage is None else asdict(self.shortage)
        return {
            "outcome": self.outcome,
            "run": self.run,
            "machine": self.machine,
            "versions": self.versions,
            "budget": self.budget,
            "stages": [stage.to_dict() for stage in self.stages],
            "rows": [row.to_dict() for row in self.rows],
            "timeline": None if self.timeline is None else self.timeline.to_json(),
            "modules": [row.to_dict() for row in self.modules],
            "advice": list(self.advice),
            "notes": list(self.notes),
            "tokens_per_second": self.tokens_per_second,
            "shortage": shortage,
            "allocator": self.allocator,
        }

    def save(self, folder: Path) -> Path:
        """Write memory_profile.json into ``folder``; returns the file."""
        path = folder / PROFILE_FILE
        write_whole(path, json.dumps(self.to_dict(), indent=2) + "\n")
        return path


def difference(row: StageRow) -> str:
    """Measured against planned, as text: "+1.2 %", or "over 10 times"; "" where one is missing."""
    if row.planned is None or row.measured is None:
        return ""
    if row.planned == 0:
        return "not planned" if row.measured else ""
    if row.measured > 10 * row.planned:
        return "over 10 times"
    return f"{100 * (row.measured - row.planned) / row.planned:+.1f} %"


def part_text(parts: dict[str, int], limit: int = 3) -> str:
    """The largest parts in words: "weights 1.2 GiB, gradients 300.0 MiB"."""
    largest: Sequence[tuple[str, int]] = sorted(parts.items(), key=lambda item: -item[1])[:limit]
    return ", ".join(f"{LABELS[part]} {format_bytes(size)}" for part, size in largest if size)


def _text(size: int | None) -> str:
    return "" if size is None else format_bytes(size)
