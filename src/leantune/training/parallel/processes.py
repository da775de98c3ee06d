"""The processes of a run: who this one is, and the few words they exchange."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from leantune.errors import ConfigError
from leantune.memory.budget.sharding import Parallel
from leantune.training.config import TrainConfig
from leantune.training.config.parallel import problems_in_parallel

_PLUGINS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}


@dataclass
class Processes:
    """``kind``: "none" (this process is alone), "ddp" or "fsdp2"; ``rank`` of ``size`` processes, one device each."""

    kind: str = "none"
    rank: int = 0
    size: int = 1
    _scratch: list[Any] = field(default_factory=list, repr=False)

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    @property
    def spread(self) -> Parallel:
        """The same, as plans take it."""
        return Parallel(self.kind, self.size)

    def described(self, config: TrainConfig) -> str:
        """For the header: how many there are, and the rows of a step."""
        if self.size == 1:
            alone = "" if config.parallel is None else f" (alone: parallel: {config.parallel} spreads nothing)"
            seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
            return alone + (f"; {seen} GPUs are visible, --nproc_per_node {seen} trains on all" if seen > 1 else "")
        rows = config.per_device_train_batch_size * config.gradient_accumulation_steps * self.size
        held = "each with the whole model" if self.kind == "ddp" else "each with its rows of every weight"
        return f"; {self.size} processes ({self.kind}), {held}; {rows} rows a step"

    def console(self, console: Console) -> Console:
        """``console`` on the first process, one that prints nothing on the others."""
        return console if self.first else Console(quiet=True)

    def folder(self, output: Path) -> Path:
        """Where this process writes its reports: ``output`` on the first, a temporary folder on the others."""
        if self.first:
            return output
        self._scratch.append(tempfile.TemporaryDirectory(prefix="leantune-"))
        return Path(self._scratch[-1].name)

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is set on any process."""
        return self.total(float(flag)) > 0

    def total(self, value: float) -> float:
        """The sum over all processes, in float64."""
        if self.size == 1:
            return value
        summed = torch.tensor(value, dtype=torch.float64, device=_device())
        dist.all_reduce(summed)
        return float(summed)

    def gather(self, value: Any) -> list[Any]:
        """What every process has, by rank."""
        if self.size == 1:
            return [value]
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, value)
        return everybody

    def wait(self) -> None:
        """Until every process has come here."""
        if self.size > 1:
            dist.barrier()


def join_processes(config: TrainConfig) -> Processes:
    """Join the processes this one was launched with (torchrun, accelerate launch, --nproc_per_node).

    Raises ConfigError for settings and launchers that cannot work, before processes speak to each other.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    kind = config.parallel or "ddp"
    problems = launcher_problems(os.environ, config)
    if size > 1:
        problems += problems_in_parallel(config, kind)
    if problems:
        raise ConfigError("\n".join(f"- {problem}" for problem in problems))
    if size == 1:
        return Processes()
    from accelerate import PartialState

    PartialState(cpu=not torch.cuda.is_available())
    return Processes(kind, dist.get_rank(), dist.get_world_size())


def refuse_launchers(command: str, instead: str) -> None:
    """Raise ConfigError in one of several processes of a launcher (WORLD_SIZE above 1): each would do all of
    ``command`` and write the same files. ``instead``: what to run, in words."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        raise ConfigError(
            f"- leantune {command} runs in one process, and a launcher (torchrun, accelerate launch) started {size}: "
            f"each would write the same files. {instead}"
        )


def leave_processes() -> None:
    """Take leave of the others, at the end of a run that went well."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def current_processes(sharded: bool) -> Processes:
    """The processes that have been joined; ``sharded``: whether this one holds shards of its parameters."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return Processes()
    return Processes("fsdp2" if sharded else "ddp", dist.get_rank(), dist.get_world_size())


def launcher_problems(environment: Mapping[str, str], config: TrainConfig) -> list[str]:
    """What accelerate's own config asks for and a run here would not do."""
    found = [
        f"accelerate's config asks for {name}, which reduces or shards gradients in its own way; take plain multi-GPU "
        "there (accelerate config), and write parallel: ddp or fsdp2 here"
        for key, name in _PLUGINS.items()
        if environment.get(key, "false").lower() in ("true", "1")
    ]
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", "bf16") or (precision == "bf16" and not config.bf16):
        found.append(
            f"accelerate's config asks for mixed precision {precision}; take none there, and write dtype: bfloat16, or "
            "dtype: float32 with bf16: true, here"
        )
    return found


def _device() -> torch.device:
    """Where tensors that processes exchange must lie."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
