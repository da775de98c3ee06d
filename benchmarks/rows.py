"""Rows of benchmark results: one CSV file a benchmark, one line a measurement, what it ran on in front.

    rows = ResultRows("my_benchmark", columns=["size", "seconds"])
    for size in sizes:
        if rows.has(size=size, seed=0):
            continue                                # measured before: an interrupted benchmark goes on where it was
        rows.append(seed=0, size=size, seconds=measure(size))

Every row begins with the commit, the versions, the machine, the seed and the date, so that a figure can be traced to
what made it. Values are compared as the text they are written as.
"""

import csv
import fcntl
import importlib.metadata
import os
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from leantune.environment import processor

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PROVENANCE = ("commit", "torch", "transformers", "leantune", "cpu", "cores", "ram_gib", "seed", "date")
"""Columns in front of every benchmark's own."""


class ResultRows:
    """The rows of one benchmark.

    Args:
        name: of the benchmark; its rows are in ``benchmarks/results/<name>.csv``.
        columns: the benchmark's own columns, in order.
        path: another file, for rehearsals and tests.
    Raises: ValueError if a column is named twice, or the file exists with other columns (rename it, or delete it).
    """

    def __init__(self, name: str, columns: Sequence[str], path: str | Path | None = None) -> None:
        self.path = Path(path) if path is not None else RESULTS / f"{name}.csv"
        self.columns = (*PROVENANCE, *columns)
        repeated = sorted({column for column in self.columns if self.columns.count(column) > 1})
        if repeated:
            raise ValueError(f"columns named twice: {', '.join(repeated)}")
        if self.path.exists():
            with self.path.open(newline="", encoding="utf-8") as file:
                header = tuple(next(csv.reader(file), ()))
            if header and header != self.columns:
                raise ValueError(
                    f"{self.path} has the columns {', '.join(header)}, not {', '.join(self.columns)}: "
                    "rename the file to keep the old rows, or delete it"
                )

    def read(self) -> list[dict[str, str]]:
        """Every complete row, as text. A last line cut short by an interruption is left out."""
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            return [row for row in csv.DictReader(file) if None not in row.values() and None not in row]

    def find(self, **key: Any) -> list[dict[str, str]]:
        """Rows whose columns have the values of ``key``; ValueError for a column that does not exist."""
        self._check(key)
        wanted = {column: _text(value) for column, value in key.items()}
        return [row for row in self.read() if all(row[column] == value for column, value in wanted.items())]

    def has(self, **key: Any) -> bool:
        """Whether such a row exists."""
        return bool(self.find(**key))

    def append(self, *, seed: int, **values: Any) -> dict[str, str]:
        """Write one row (at once, and flushed to the disk) and return it. Own columns without a value stay empty."""
        self._check(values)
        row = dict.fromkeys(self.columns, "")
        row.update({column: _text(value) for column, value in {**provenance(), "seed": seed, **values}.items()})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            # Two processes may share a file: one header, and no line inside another.
            fcntl.flock(file, fcntl.LOCK_EX)
            self._finish_last_line()
            writer = csv.DictWriter(file, fieldnames=self.columns, lineterminator="\n")
            if self.path.stat().st_size == 0:
                writer.writeheader()
            writer.writerow(row)
            file.flush()
            os.fsync(file.fileno())
        return row

    def _finish_last_line(self) -> None:
        """A process killed while writing leaves a line without an end: end it, so that the next row has its own."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return
        with self.path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")

    def _check(self, values: Mapping[str, Any]) -> None:
        unknown = sorted(set(values) - set(self.columns))
        if unknown:
            raise ValueError(f"{self.path.name} has no column {', '.join(unknown)}; it has {', '.join(self.columns)}")


def provenance() -> dict[str, str]:
    """The commit, versions, machine and date, as they go in front of a row (the seed aside)."""
    return {
        "commit": _commit(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "leantune": _version("leantune"),
        "cpu": processor(),
        "cores": str(os.cpu_count()),
        "ram_gib": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f}",
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _commit() -> str:
    """Short hash of the checked-out commit, "+" where files differ from it, "uncommitted" where there is none."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        status = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", "src"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    except OSError:
        return "unknown"
    if head.returncode != 0:
        return "uncommitted"
    return head.stdout.strip() + ("+" if status.stdout.strip() else "")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "source" if package == "leantune" else "none"
