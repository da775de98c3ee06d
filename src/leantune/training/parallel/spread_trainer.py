"""A trainer whose model is spread over processes: rows and steps, checkpoints, random numbers."""

import copy
import os
import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader
from transformers.trainer_utils import set_seed
from trl import SFTTrainer

from leantune.backward.reduction import Reducer
from leantune.optim.row_shard import is_sharded
from leantune.training.checkpoints import WEIGHTS, checkpoints, remove_whole
from leantune.training.parallel.processes import current_processes
from leantune.training.parallel.sharded_checkpoint import (
    is_sharded_checkpoint,
    load_sharded_model,
    load_sharded_optimizer,
    save_sharded,
)
from leantune.training.parallel.shards import gathered, holds_shards, reshard
from leantune.training.state_dtypes import state_dtypes_kept


class SpreadTrainer(SFTTrainer):
    """SFTTrainer in one process or several, without DistributedDataParallel: weights are replicated or sharded before,
    and gradients averaged in backward."""

    def __init__(self, **arguments: Any) -> None:
        self.sharded = holds_shards(arguments["model"])
        self.processes = current_processes(self.sharded)
        super().__init__(**arguments)
        if self.processes.size > 1:
            # Gradients are averaged here; accelerate's wrapper would keep buckets for them.
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
            set_seed(self.args.seed + self.processes.rank)  # dropout of its own for each process's rows

    # -- gradients of an ordinary backward --------------------------------------------------------------------------

    @torch.no_grad()
    def average_gradients(self, model: nn.Module) -> None:
        """After the last micro-batch of an ordinary backward: every process gets the mean of all gradients. FSDP2 has
        done this already."""
        whole: list[Tensor] = [param for param in model.parameters() if param.requires_grad and not is_sharded(param)]
        if self.processes.size == 1 or not whole or not self.accelerator.sync_gradients:
            return
        grads = {param: param.grad for param in whole if param.grad is not None}
        for param, averaged in Reducer(whole, torch.distributed.group.WORLD).sums(grads):
            param.grad = averaged

    # -- held-out rows ----------------------------------------------------------------------------------------------

    def held_out_batches(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """This process's batches of the held-out rows, as many on each, and whether each counts (the last ones may
        come again, so that all processes take part)."""
        size, rank = self.processes.size, self.processes.rank
        if size == 1:
            yield from ((batch, True) for batch in self.get_eval_dataloader())
            return
        rows: Any = self.eval_dataset
        every = list(BatchSampler(range(len(rows)), self.args.eval_batch_size, drop_last=False))
        turns = range(rank, -(-len(every) // size) * size, size)
        mine = [every[turn % len(every)] for turn in turns]
        loader = DataLoader(rows, batch_sampler=mine, collate_fn=self.data_collator)
        for turn, batch in zip(turns, loader, strict=True):
            yield batch, turn < len(every)
        if self.sharded:
            reshard(self._module)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Written into a folder aside, then renamed: a checkpoint that carries the name is whole."""
        written = self._write_aside(model, trial)
        if self.processes.first:
            final = self._folder / written.name
            remove_whole(final)
            os.replace(written, final)
            shutil.rmtree(written.parent, ignore_errors=True)
            self._drop_old_checkpoints()
        self.processes.wait()

    def _write_aside(self, model: nn.Module, trial: Any) -> Path:
        """Write a whole checkpoint, down to the disk, into a folder that no reader looks into; returns it."""
        aside = self._folder / ".saving"
        if self.processes.first:
            shutil.rmtree(aside, ignore_errors=True)
        self.processes.wait()
        self._aside = aside
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._aside = None
        self.processes.wait()
        written = aside / f"checkpoint-{self.state.global_step}"
        if self.processes.first:
            self._save_beside(written)
            synced(written)
        return written

    def probe_checkpoint(self) -> int:
        """Write a checkpoint aside and remove it again; returns its bytes. Training's state is left as it was."""
        kept = copy.deepcopy(self.state.stateful_callbacks)
        size = 0
        try:
            written = self._write_aside(self.model, None)  # type: ignore[arg-type]
            if self.processes.first:
                size = sum(path.stat().st_size for path in written.rglob("*") if path.is_file())
        finally:
            self.state.stateful_callbacks = kept
            if self.processes.first:
                shutil.rmtree(self._folder / ".saving", ignore_errors=True)
        return int(self.processes.total(size))

    def save_checkpoint(self) -> None:
        """Write a checkpoint of where training stands now."""
        self._save_checkpoint(self.model, None)  # type: ignore[arg-type]

    def save_whole(self, folder: Path) -> None:
        """Model, tokenizer and what goes beside them into ``folder``, each file written aside and renamed into
        place."""
        aside = folder / ".saving"
        if self.processes.first:
            shutil.rmtree(aside, ignore_errors=True)
        self.save_model(str(aside))
        if self.processes.first:
            self._save_beside(aside)
            synced(aside)
            # The weights come last: a folder that holds them holds everything.
            for path in sorted(aside.rglob("*"), key=lambda path: (path.name in WEIGHTS, path)):
                if path.is_file():
                    place = folder / path.relative_to(aside)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(path, place)
            shutil.rmtree(aside, ignore_errors=True)
        self.processes.wait()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The model as one process would write it; of a checkpoint of shards, what stands beside them."""
        if not self.sharded:
            super().save_model(output_dir, _internal_call)
            return
        place = output_dir or str(self.args.output_dir)
        if _internal_call:
            os.makedirs(place, exist_ok=True)  # shards follow, with the optimizer's
            return
        adapters = hasattr(self.model, "peft_config")
        state = gathered(self._module, self.processes.first, adapters)
        if self.processes.first:
            self._save(place, state_dict=state)

    def _save_beside(self, folder: Path) -> None:
        """Further files of a checkpoint or a model."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        # Of an optimizer without a step torch would make states by one.
        optimizer = self._plain_optimizer if self.state.global_step else None
        save_sharded(Path(output_dir), self._module, optimizer)
        if self.processes.first:
            scheduler: Any = self.lr_scheduler
            torch.save(scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Sharded weights, and adapters; a model that trains whole was built from the checkpoint's weights."""
        folder = Path(resume_from_checkpoint)
        if is_sharded_checkpoint(folder):
            load_sharded_model(folder, self._module)
        elif not self.sharded and hasattr(self._module, "peft_config"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_sharded_checkpoint(Path(checkpoint)):
            with state_dtypes_kept(self._plain_optimizer):
                super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_sharded_optimizer(Path(checkpoint), self._module, self._plain_optimizer)
        scheduler: Any = self.lr_scheduler
        scheduler.load_state_dict(torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True))

    def _save_rng_state(self, output_dir: str) -> None:
        """One file a process, the first's as if it were alone."""
        if self.processes.size == 1:
            super()._save_rng_state(output_dir)
            return
        mine: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
        mine["cpu"] = torch.get_rng_state()
        if torch.cuda.is_available():
            mine["cuda"] = torch.cuda.get_rng_state()
        states = self.processes.gather(mine)
        if self.processes.first:
            os.makedirs(output_dir, exist_ok=True)
            for rank, state in enumerate(states):
                torch.save(state, os.path.join(output_dir, _random_file(rank)))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """This process's own; one that there was not draws from the seed, the step and its rank."""
        if self.processes.size == 1 or checkpoint is None:
            super()._load_rng_state(checkpoint)
            return
        path = Path(checkpoint) / _random_file(self.processes.rank)
        if not path.is_file():
            set_seed(self.args.seed + self.processes.rank + 1000 * self.state.global_step)
            return
        from transformers.trainer_pt_utils import safe_globals

        with safe_globals():
            state = torch.load(path, weights_only=True)
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["cpu"])
        if torch.cuda.is_available() and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])

    _aside: Path | None = None

    @property
    def _plain_optimizer(self) -> Any:
        optimizer: Any = self.optimizer
        return getattr(optimizer, "optimizer", optimizer)

    @property
    def _module(self) -> nn.Module:
        model: Any = self.model
        return model

    @property
    def _folder(self) -> Path:
        return Path(str(self.args.output_dir))

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._aside) if self._aside is not None else super()._get_output_dir(trial)

    def _checkpoints_kept(self) -> int | None:
        """How many checkpoints are kept; None for all."""
        return None

    def _drop_old_checkpoints(self) -> None:
        limit = self._checkpoints_kept()
        kept = checkpoints(self._folder)
        for path in kept[: max(0, len(kept) - limit)] if limit else []:
            remove_whole(path)


def synced(folder: Path) -> None:
    """Have every file under ``folder`` on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _random_file(rank: int) -> str:
    return "rng_state.pth" if rank == 0 else f"rng_state_{rank}.pth"
