"""memory_calibration.json: what a profile measured beside what was planned, for later plans on the same machine.

The file is one JSON object::

    {"format": 1, "made": "2026-11-30T22:00:00+00:00",
     "machine": {"device": "cpu", "name": ..., "memory_bytes": ...}, "versions": {"torch": ..., ...},
     "run": {"model": ..., "method": ..., "optim": ..., "where": "8 x 1024 tokens", ...},
     "rows": [{"stage": "steady step", "part": "gradients", "planned": 1000, "measured": 1020, "error": -0.0196}, ...],
     "beside_tensors": 180000000, "median_error": 0.01, "worst_error": 0.04}

Errors are (planned - measured) / measured; `median_error` and `worst_error` are of the stages' totals, without sign.
``beside_tensors`` is what the process (on a GPU the allocator) used beyond the tensors at the peak of a steady step.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from leantune.errors import InvalidArgumentError
from leantune.memory.reports.stages import TOTAL, StageRow
from leantune.whole_file import write_whole

FORMAT = 1
CALIBRATION_FILE = "memory_calibration.json"


@dataclass(frozen=True)
class Calibration:
    """What one profile found; bytes."""

    machine: dict[str, Any]
    versions: dict[str, str]
    run: dict[str, Any]
    """What was profiled: model, method, optimizer, batch and length."""
    rows: tuple[StageRow, ...]
    beside_tensors: int | None
    made: str = ""
    """Date and time, ISO 8601."""

    @property
    def median_error(self) -> float | None:
        """Median of |planned - measured| / measured over the stages' totals; None where nothing was planned."""
        errors = self._errors()
        return statistics.median(errors) if errors else None

    @property
    def worst_error(self) -> float | None:
        """The largest of them."""
        return max(self._errors(), default=None)

    def _errors(self) -> list[float]:
        return [abs(row.error) for row in self.rows if row.part == TOTAL and row.error is not None]

    def ratio(self, stage: str, part: str = TOTAL) -> float | None:
        """measured / planned: what to multiply a plan's figure by. None where the profile lacks one of the two."""
        for row in self.rows:
            if (row.stage, row.part) == (stage, part) and row.planned and row.measured is not None:
                return row.measured / row.planned
        return None

    def save(self, path: str | Path) -> Path:
        """Write the file (into a folder under its usual name); returns it."""
        path = Path(path)
        path = path / CALIBRATION_FILE if path.is_dir() else path
        values = {"format": FORMAT, **asdict(self), "rows": [row.to_dict() for row in self.rows]}
        values |= {"median_error": self.median_error, "worst_error": self.worst_error}
        write_whole(path, json.dumps(values, indent=2) + "\n")
        return path


def calibration(
    rows: Sequence[StageRow],
    *,
    machine: dict[str, Any],
    versions: dict[str, str],
    run: dict[str, Any],
    beside_tensors: int | None,
) -> Calibration:
    """A `Calibration` made now."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Calibration(machine, versions, run, tuple(rows), beside_tensors, now)


def read_calibration(path: str | Path) -> Calibration:
    """Read what `Calibration.save` wrote, from a file or the folder that holds it.

    Raises: InvalidArgumentError where there is no such file, or it is of another format.
    """
    path = Path(path)
    path = path / CALIBRATION_FILE if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise InvalidArgumentError(
                f"{path} has format {values['format']}, and this version of leantune reads {FORMAT}; run "
                "`leantune profile` again"
            )
        rows = tuple(StageRow(row["stage"], row["part"], row["planned"], row["measured"]) for row in values["rows"])
        return Calibration(
            values["machine"], values["versions"], values["run"], rows, values["beside_tensors"], values["made"]
        )
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise InvalidArgumentError(
            f"{path} cannot be read as a memory calibration ({type(error).__name__}: {error}); "
            f"`leantune profile CONFIG` writes one as {CALIBRATION_FILE}"
        ) from error
