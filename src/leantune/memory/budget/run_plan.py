"""A run's plan against its budgets: every stage and part, whether it fits, what to change, how large it could be."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from leantune.memory.budget.advice import Advice
from leantune.memory.budget.largest import Largest
from leantune.memory.budget.run_stages import PART_LABELS, STAGE_PARTS, Stage, StagedBytes
from leantune.memory.budget.sharding import Parallel
from leantune.memory.closed_form.settings import RunSettings
from leantune.memory.plan_file import write_plan
from leantune.memory.sizes import format_bytes


@dataclass(frozen=True)
class Budgets:
    """Bytes that may be used; None: not limited. Each is held on its own."""

    memory: int | None = None
    host: int | None = None
    disk: int | None = None


@dataclass(frozen=True)
class RunPlan:
    """What a run needs, stage by stage, and what that means for its budgets. Every figure is for `where`."""

    model: str
    parameters: int
    trained: int
    settings: RunSettings
    parallel: Parallel
    staged: StagedBytes
    disk_bytes: int
    budgets: Budgets
    dtypes: Mapping[str, str]
    """Of weights, computation, gradients and states (trap P5)."""
    advice: tuple[Advice, ...] = ()
    largest: Largest | None = None
    tiers: Mapping[str, int] = field(default_factory=dict)
    """Bytes of tensors at a steady step's peak, by tier: closed, traced, measured."""
    notes: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
    """What ``method: auto`` chose, in five lines; empty where the method was set."""

    @property
    def where(self) -> str:
        """Batch, length and processes, as every figure must be read."""
        return self.settings.where + self.parallel.where

    @property
    def peak(self) -> Stage:
        """The stage that decides."""
        return self.staged.peak

    @property
    def total(self) -> int:
        """Bytes on the device at the run's peak."""
        return self.peak.total

    @property
    def free(self) -> int | None:
        """Bytes left of the memory budget, negative where it does not fit; None without a budget."""
        return None if self.budgets.memory is None else self.budgets.memory - self.total

    @property
    def over(self) -> tuple[str, ...]:
        """Budgets that are exceeded, each in words."""
        needs = (
            ("memory", self.total, self.budgets.memory, f"in {self.peak.name}, most of it {self._largest_part()}"),
            ("host memory", self.staged.host_peak.host, self.budgets.host, f"in {self.staged.host_peak.name}"),
            ("disk", self.disk_bytes, self.budgets.disk, "for checkpoints and the model"),
        )
        return tuple(
            f"{name}: {format_bytes(need - budget)} too much ({format_bytes(need)} of {format_bytes(budget)}) {where}"
            for name, need, budget, where in needs
            if budget is not None and need > budget
        )

    @property
    def fits(self) -> bool:
        """Whether every budget holds."""
        return not self.over

    def _largest_part(self) -> str:
        part = max(self.peak.parts, key=lambda name: self.peak.parts[name])
        return f"{PART_LABELS[part]} ({format_bytes(self.peak.parts[part])})"

    # -- views --------------------------------------------------------------------------------------------------------

    def part_rows(self) -> list[tuple[str, str, str]]:
        """(part, bytes at the run's peak, the part's own most in a step) as text; the total last."""
        rows = []
        for part in STAGE_PARTS:
            here, most = self.peak.parts.get(part, 0), self.staged.part_peaks.get(part, 0)
            if here or most:
                rows.append((PART_LABELS[part], format_bytes(here), format_bytes(max(here, most))))
        return [*rows, ("total", format_bytes(self.total), "")]

    def stage_rows(self) -> list[tuple[str, str, str]]:
        """(stage, bytes on the device, bytes on the host) as text."""
        return [(stage.name, format_bytes(stage.total), format_bytes(stage.host)) for stage in self.staged.stages]

    def verdict(self) -> str:
        """One line: fits with so much to spare, or what is exceeded."""
        if self.budgets == Budgets():
            return f"needs {format_bytes(self.total)} on the device; no budget was given"
        if self.over:
            return "does not fit: " + "; ".join(self.over)
        if self.free is None:
            return "fits its budgets"
        return f"fits: {format_bytes(self.free)} of {format_bytes(self.budgets.memory or 0)} stay free"

    def table(self) -> str:
        """All of it as text."""
        lines = [
            *(("method: auto", *(f"  {line}" for line in self.chosen)) if self.chosen else ()),
            f"plan for {self.model} ({self.parameters:,} parameters, {self.trained:,} trained) at {self.where}",
            "dtypes: " + ", ".join(f"{name} {dtype}" for name, dtype in self.dtypes.items()),
            *columns([("part", f"at the peak ({self.peak.name})", "its own peak"), *self.part_rows()]),
            *columns([("stage", "device", "host"), *self.stage_rows()]),
            f"disk: {format_bytes(self.disk_bytes)}",
            self.verdict(),
        ]
        if self.advice:
            lines.append("what would help, cheapest first:")
            lines += [f"  {advice}" for advice in self.advice]
        if self.largest is not None:
            lines.append(f"largest that fits: {self.largest}")
        lines += self._tier_lines()
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _tier_lines(self) -> list[str]:
        if len(self.tiers) < 2:
            return []
        names = list(self.tiers)
        base = self.tiers[names[0]]
        return [
            f"{name} against {names[0]}: {format_bytes(self.tiers[name])} against {format_bytes(base)} "
            f"({100 * (self.tiers[name] - base) / base:+.1f} %), tensors of a steady step"
            for name in names[1:]
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything, JSON-ready."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "trained": self.trained,
            "batch_size": self.settings.batch_size,
            "length": self.settings.length,
            "where": self.where,
            "settings": asdict(self.settings),
            "parallel": asdict(self.parallel),
            "dtypes": dict(self.dtypes),
            "total": self.total,
            "peak_stage": self.peak.name,
            "parts": dict(self.peak.parts),
            "part_peaks": dict(self.staged.part_peaks),
            "saved": dict(self.staged.saved),
            "stages": {stage.name: {"device": stage.total, "host": stage.host} for stage in self.staged.stages},
            "disk": self.disk_bytes,
            "budgets": asdict(self.budgets),
            "fits": self.fits,
            "free": self.free,
            "over": list(self.over),
            "advice": [asdict(advice) for advice in self.advice],
            "largest": None if self.largest is None else asdict(self.largest),
            "tiers": dict(self.tiers),
            "notes": list(self.notes),
            "chosen": list(self.chosen),
        }

    def to_json(self) -> str:
        """`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def save(self, path: str | Path) -> Path:
        """Write `to_json` to ``path`` (a file, or a folder that gets ``memory_plan.json``); returns the file."""
        return write_plan(self.to_json(), path)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text as aligned lines, the first column to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]
