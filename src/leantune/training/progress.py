"""The progress bar: step, loss, true gradient norm, learning rate and memory of the process."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from leantune.memory import format_bytes, process_peak

LINES = 20
"""Lines printed over a run where the console is no terminal."""


class ProgressBar(TrainerCallback):
    """A live bar on a terminal; elsewhere (a log file) about `LINES` plain lines over the run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._text = ""
        self._printed = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Draw the bar, from the step a resumed run starts at."""
        if not self._console.is_terminal or self._console.quiet:
            return
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("", total=state.max_steps, completed=state.global_step, text="")
        self._progress.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Move the bar."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
        """Show the latest figures."""
        logs = logs or {}
        if "eval_loss" in logs:
            self._say(f"step {state.global_step}: held-out loss {logs['eval_loss']:.4f}")
        if "loss" not in logs:
            return
        shown = [f"loss {logs['loss']:.4f}"]
        if logs.get("grad_norm") is not None:
            shown.append(f"grad norm {float(logs['grad_norm']):.3g}")
        shown.append(f"lr {logs.get('learning_rate', 0.0):.3g}")
        shown.append(f"memory {format_bytes(process_peak(args.device).current)}")
        text = "  ".join(shown)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, text=text)
            return
        share = state.global_step * LINES // max(1, state.max_steps)
        if share != self._printed or state.global_step == state.max_steps:
            self._printed = share
            self._say(f"step {state.global_step}/{state.max_steps}  {text}")

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Leave the finished bar on the screen."""
        self.stop()

    def stop(self) -> None:
        """End the live bar, also where training was stopped by an error; can be called twice."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False)
