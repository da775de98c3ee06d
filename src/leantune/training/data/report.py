"""What was found while data were read: sources, lengths, problems, and the rows that were left out."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy

from leantune.errors import ConfigError
from leantune.training.data.problems import Findings, Problem
from leantune.whole_file import replacing

DROPPED_FILE = "dropped.jsonl"
_SHOWN = 10


@dataclass
class SourceReport:
    """One data set: ``read`` rows, of which ``usable`` are left; ``cut`` are longer than max_length, ``masked`` hold
    nothing to learn within it (counted before anything is dropped)."""

    key: str
    name: str
    shape: str | None = None
    read: int = 0
    usable: int = 0
    cut: int = 0
    masked: int = 0
    copies: int = 0
    """Rows to train on that are also held out."""
    tokens: int = 0
    trained: int = 0
    lengths: dict[str, int] = field(default_factory=dict)
    """p50, p90, p99 and longest, in tokens, before anything is cut."""
    taken: int | None = None
    """Rows an epoch takes of it, where that is not ``usable``."""
    findings: Findings = field(default_factory=Findings)
    example: tuple[list[int], list[int]] | None = None
    """(input_ids, labels) of the first row that can be used."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; problems with their places."""
        names = ("key", "name", "shape", "read", "usable", "cut", "masked", "copies", "tokens", "trained", "lengths")
        counts = {name: getattr(self, name) for name in (*names, "taken")}
        problems = [problem.to_json() for problem in self.findings.of("file", "row", "note")]
        return {**counts, "counts": dict(self.findings.counts), "problems": problems}

    def measure(self, lengths: Sequence[int], trained: Sequence[int]) -> None:
        """Percentiles and sums of the rows' lengths, in tokens."""
        self.tokens, self.trained = int(sum(lengths)), int(sum(trained))
        if len(lengths):
            marks = numpy.percentile(numpy.asarray(lengths), (50, 90, 99), method="higher")
            self.lengths = dict(zip(("p50", "p90", "p99"), map(int, marks))) | {"longest": max(lengths)}


class DataReport:
    """All sources of a run. Rows that were left out are kept in a temporary file until `write_dropped`."""

    def __init__(self, drop_invalid: bool) -> None:
        self.drop_invalid = drop_invalid
        self.sources: list[SourceReport] = []
        self.notes: list[str] = []
        self.max_length = 0
        self.looked_at: int | None = None
        """Rows of each source that were looked at, where they are not all (streaming)."""
        self._dropped: IO[str] | None = None
        self.dropped = 0

    def add(self, source: SourceReport, problem: Problem) -> None:
        """Keep a problem of ``source``; with drop_invalid its row is kept for the file of rows left out."""
        source.findings.add(problem)
        if self.drop_invalid and problem.severity == "row":
            if self._dropped is None:
                self._dropped = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
            self.dropped += 1
            self._dropped.write(json.dumps({**problem.to_json(), "data": problem.raw}, default=str) + "\n")

    @property
    def clean(self) -> bool:
        """Whether nothing keeps the data, as they are, from being trained on."""
        return not any(source.findings.stops for source in self.sources)

    def refuse(self) -> None:
        """Raise ConfigError with every source's problems, unless all of them are rows and rows are to be dropped."""
        told = [text for source in self.sources for text in self._told(source)]
        if told:
            raise ConfigError("\n".join(told))

    def _told(self, source: SourceReport) -> list[str]:
        head, findings = f"- {source.key}", source.findings
        told = [f"{head}: {problem}" for problem in findings.of("file")[:_SHOWN]]
        if (more := findings.counts["file"] - _SHOWN) > 0:
            told.append(f"{head}: and {more} more like these in {source.name}")
        bad = findings.counts["row"]
        if bad and not self.drop_invalid:
            fix = f"drop_invalid: true leaves them out, and writes them to {DROPPED_FILE}"
            told.append(f"{head}: {bad} of {source.read} rows cannot be used ({fix}):\n  {self.listed(source)}")
        elif not source.usable and not told:
            listed = f":\n  {self.listed(source)}" if bad else ""
            told.append(f"{head}: {source.name}: no row is left to train on{listed}")
        return told

    def listed(self, source: SourceReport) -> str:
        """The first rows that cannot be used, a line each."""
        more = source.findings.counts["row"] - _SHOWN
        lines = [str(problem) for problem in source.findings.of("row")[:_SHOWN]]
        return "\n  ".join([*lines, *([f"and {more} more"] if more > 0 else [])])

    def remarks(self) -> list[str]:
        """What a run's header says of the data."""
        said = list(self.notes)
        for source in self.sources:
            said += [str(note) for note in source.findings.of("note")]
            if source.findings.counts["row"]:
                bad = f"{source.name}: dropped {source.findings.counts['row']} of {source.read} rows"
                said.append(f"{bad} ({DROPPED_FILE} holds them):\n  {self.listed(source)}")
            if source.cut:
                said.append(
                    f"{source.name}: {source.cut} of {source.read} rows are longer than max_length {self.max_length} "
                    f"(the longest: {source.lengths['longest']} tokens) and are cut; from those the model does not "
                    "learn to stop"
                )
        return said

    def write_dropped(self, folder: Path) -> Path | None:
        """Copy the rows left out into ``folder``/dropped.jsonl: file, line, field, why, fix, and the row as it was."""
        if self._dropped is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        self._dropped.flush()
        self._dropped.seek(0)
        with replacing(folder / DROPPED_FILE) as aside, aside.open("w", encoding="utf-8") as file:
            shutil.copyfileobj(self._dropped, file)
        return folder / DROPPED_FILE

    def to_json(self) -> dict[str, Any]:
        """Plain values, for ``leantune validate --json``."""
        sources = [source.to_json() for source in self.sources]
        return {
            "clean": self.clean,
            "max_length": self.max_length,
            "looked_at": self.looked_at,
            "dropped": self.dropped,
            "notes": self.notes,
            "sources": sources,
        }
