"""A checkpoint written and removed before the first step: what cannot be saved ends a run at once, not hours in."""

import shutil
from typing import Any

from transformers import TrainerCallback

from leantune.errors import NotEnoughRoomError
from leantune.memory import format_bytes
from leantune.training.trainer import LeanTrainer


class SaveProbe(TrainerCallback):
    """Writes one when training begins, and looks whether the disk holds as many as the run will keep. ``states``: bytes
    of the optimizer's states, which are not there yet."""

    def __init__(self, trainer: LeanTrainer, states: int) -> None:
        self._trainer = trainer
        self._states = states

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Before step 1. Raises NotEnoughRoomError where the disk is too small; nothing was trained."""
        trainer = self._trainer
        folder = str(args.output_dir)
        try:
            size = trainer.probe_checkpoint()
        except OSError as error:
            raise NotEnoughRoomError(
                f"no checkpoint can be written to {folder}: {error}. Nothing was trained. Write another output_dir, or "
                "make room"
            ) from error
        free = shutil.disk_usage(folder).free
        resumed = state.global_step > 0
        size += 0 if resumed else self._states
        files = 2 if resumed else self._files(args)
        need = files * size
        if need > free:
            raise NotEnoughRoomError(
                f"{folder} has {format_bytes(free)} free, and {files} times {format_bytes(size)} will be "
                "written: the model, every checkpoint kept, and one more while it is written. Nothing was trained. "
                "Lower save_total_limit, write save_strategy: no, or another output_dir"
            )

    def _files(self, args: Any) -> int:
        """Whole checkpoints on the disk at once, the model at the end counted as one."""
        if str(getattr(args.save_strategy, "value", args.save_strategy)) == "no":
            return 1
        kept = self._trainer.lean.save_total_limit
        return (1 if kept is None else kept + 1) + 1
