"""log.jsonl: one JSON object a logged step, flushed as it comes; loss.png is drawn from it."""

import json
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from leantune.memory import process_peak
from leantune.memory.plots import plot_loss


class RunLog(TrainerCallback):
    """Writes what transformers logs, with the time and the memory beside it; ``append`` goes on with an earlier file."""

    def __init__(self, folder: Path, append: bool = False) -> None:
        self.path = folder / "log.jsonl"
        self.rows: list[dict[str, Any]] = []
        if append and self.path.exists():
            self.rows = [
                json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines() if line.strip()
            ]
        self._start = time.time()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
        """One row. Rows of steps that a resumed run repeats are replaced."""
        row = {"step": state.global_step, **(logs or {}), "resident_bytes": process_peak().current}
        row["seconds"] = round(time.time() - self._start, 3)
        self.rows = [old for old in self.rows if old["step"] < row["step"] or ("loss" in old) != ("loss" in row)]
        self.rows.append(row)
        text = "".join(json.dumps(old) + "\n" for old in self.rows)
        self.path.write_text(text, encoding="utf-8")

    def plot(self, path: Path, before: float | None, after: float | None) -> None:
        """loss.png: training loss by step, held-out loss before and after."""
        steps = [float(row["step"]) for row in self.rows if "loss" in row]
        losses = [float(row["loss"]) for row in self.rows if "loss" in row]
        if not steps:
            return
        held_out = [(place, loss) for place, loss in ((0.0, before), (steps[-1], after)) if loss is not None]
        plot_loss(steps, losses, path, heldout=held_out)
