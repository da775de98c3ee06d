"""What is wrong with data, and where: a file, a line, a field, why it cannot be used, and what to do."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Severity = Literal["file", "row", "note"]
"""file: the file as it is cannot be used; row: the row can be dropped; note: nothing is stopped by it."""

KEPT = 1000
"""Problems kept with their words; further ones are counted."""


class Place(NamedTuple):
    """Where a row stands; ``line`` and ``row`` count from 1, ``line`` is None where a format has no lines.

    >>> print(Place("d.jsonl", line=3, row=2)), print(Place("d.parquet", row=2))
    d.jsonl, line 3
    d.parquet, row 2
    (None, None)
    """

    file: str
    line: int | None = None
    row: int | None = None

    def __str__(self) -> str:
        if self.line is not None:
            return f"{self.file}, line {self.line}"
        return self.file if self.row is None else f"{self.file}, row {self.row}"


@dataclass(frozen=True)
class Problem:
    """One thing found; ``raw`` is the row as it was read (a dict, or the text of its line)."""

    place: Place
    why: str
    fix: str = ""
    column: str = ""
    severity: Severity = "row"
    raw: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.place}: {said(self.column, self.why, self.fix)}"

    def to_json(self) -> dict[str, Any]:
        """Plain values: file, line, row, field, why, fix, severity."""
        where = {"file": self.place.file, "line": self.place.line, "row": self.place.row}
        return {**where, "field": self.column, "why": self.why, "fix": self.fix, "severity": self.severity}


class BadRowError(ValueError):
    """A row that cannot be used: why, in which field, and what to do."""

    def __init__(self, why: str, column: str = "", fix: str = "") -> None:
        super().__init__(said(column, why, fix))
        self.why, self.column, self.fix = why, column, fix

    def at(self, place: Place, raw: Any) -> Problem:
        """The problem of the row that stands at ``place``."""
        return Problem(place, self.why, self.fix, self.column, raw=raw)


def said(column: str, why: str, fix: str) -> str:
    """ "messages[1].role: 'narrator' is not known; write user, assistant or system", without the parts that are empty.

    >>> said("text", "it is empty", "")
    'text: it is empty'
    """
    return f"{f'{column}: ' if column else ''}{why}{f'; {fix}' if fix else ''}"


@dataclass
class Findings:
    """Problems as they are found: the first ones with their words, all of them counted."""

    kept: list[Problem] = field(default_factory=list)
    counts: dict[Severity, int] = field(default_factory=lambda: {"file": 0, "row": 0, "note": 0})

    def add(self, problem: Problem) -> None:
        """Count it, and keep its words among the first of its severity."""
        self.counts[problem.severity] += 1
        if self.counts[problem.severity] <= KEPT:
            self.kept.append(problem)

    def of(self, *severities: Severity) -> list[Problem]:
        """Those kept, files before rows before notes, in the order in which they were found."""
        return [problem for severity in severities for problem in self.kept if problem.severity == severity]

    @property
    def stops(self) -> int:
        """How many keep the data from being used as they are."""
        return self.counts["file"] + self.counts["row"]
