"""SIGINT and SIGTERM: the step under way is finished, a checkpoint is written, and the run ends, on all processes."""

import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from leantune.errors import StoppedError
from leantune.training.parallel.processes import Processes

if TYPE_CHECKING:
    from leantune.training.trainer import LeanTrainer

_PATIENCE = 3.0
"""Seconds after which a second signal ends the process at once. A terminal and a launcher may both send the first."""


class StopOnSignal(TrainerCallback):
    """``received``: the signal that ended training, on any process; None where it was not ended so."""

    def __init__(self, processes: Processes) -> None:
        self.received: signal.Signals | None = None
        self._processes = processes
        self._here = 0
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Take the signals, in the main thread; elsewhere they cannot be taken."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)

    def remove(self) -> None:
        """Give the signals back."""
        while self._before:
            signal.signal(*self._before.popitem())

    def raise_if_stopped(self, trainer: "LeanTrainer") -> None:
        """Raise StoppedError, on every process, where training ended by a signal."""
        if self.received is not None:
            raise StoppedError(
                f"stopped by {self.received.name} after step {trainer.state.global_step}; its checkpoint is in "
                f"{trainer.args.output_dir}. resume: true (--resume) goes on from it.",
                self.received,
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Ask all processes whether any was told to stop."""
        told = max(self._processes.gather(self._here)) if self._processes.any(self._here > 0) else 0
        if told:
            self.received = signal.Signals(told)
            control.should_save = control.should_training_stop = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._here and time.monotonic() - self._since > _PATIENCE:
            self.remove()
            signal.raise_signal(number)
        elif not self._here:
            self._here, self._since = number, time.monotonic()
