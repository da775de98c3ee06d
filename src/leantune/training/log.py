"""log.jsonl: one JSON object a logged step, flushed as it comes; loss.png and curves.png are drawn from it."""

import json
import os
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from leantune.memory import process_peak
from leantune.memory.reports.plots import plot_loss
from leantune.training.curves import plot_curves
from leantune.training.moved import MovedShare


class RunLog(TrainerCallback):
    """Writes what transformers logs, with the time, the speed of the steps since the last row, the memory and the share
    of weights that ``moved`` beside it; ``trainer`` counts the tokens, ``append`` goes on with an earlier file."""

    def __init__(self, folder: Path, moved: MovedShare, trainer: Any, append: bool = False) -> None:
        self._moved, self._trainer = moved, trainer
        self._step_start = self._in_steps = 0.0
        self._tokens = 0
        self.path = folder / "log.jsonl"
        self.rows: list[dict[str, Any]] = []
        if append and self.path.exists():
            self.rows = _read_rows(self.path)
        self._start = time.time()

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Time steps alone: neither evaluations nor checkpoints."""
        self._step_start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """As `on_step_begin`."""
        self._in_steps += time.perf_counter() - self._step_start

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
        """One row, appended."""
        row = {"step": state.global_step, **(logs or {}), "resident_bytes": process_peak().current}
        if "loss" in row:
            if self._moved.percent is not None:
                row["moved_pct"] = self._moved.percent
            seen = self._trainer.tokens_seen
            if self._in_steps:
                row["tokens_per_second"] = round((seen - self._tokens) / self._in_steps, 1)
            self._tokens, self._in_steps = seen, 0.0
        row["seconds"] = round(time.time() - self._start, 3)
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Start the file: empty, or with the rows up to the step a resumed run goes on from."""
        self.rows = [row for row in self.rows if row["step"] <= state.global_step]
        aside = self.path.with_suffix(".tmp")
        aside.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
        os.replace(aside, self.path)

    def plot(self, folder: Path, before: tuple[int, float | None], after: float | None) -> None:
        """loss.png: training loss by step, held-out loss before (at its step) and after; curves.png: what else was
        logged."""
        plot_curves(self.rows, folder / "curves.png")
        steps = [float(row["step"]) for row in self.rows if "loss" in row]
        losses = [float(row["loss"]) for row in self.rows if "loss" in row]
        if not steps:
            return
        held_out = [(float(place), loss) for place, loss in (before, (steps[-1], after)) if loss is not None]
        plot_loss(steps, losses, folder / "loss.png", heldout=held_out)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier run; a last line that a kill cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
