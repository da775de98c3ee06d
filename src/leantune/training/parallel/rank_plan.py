"""The plan of a sharded run: what one process of several holds, in closed form."""

from dataclasses import replace

from rich.console import Console

from leantune.errors import ConfigError, InvalidArgumentError
from leantune.memory.sizes import format_bytes, parse_size
from leantune.training.config import TrainConfig
from leantune.training.data.load import PreparedData
from leantune.training.parallel.processes import Processes
from leantune.training.planning.plan import plan


def hold_rank_against_budget(config: TrainConfig, data: PreparedData, processes: Processes, console: Console) -> None:
    """Print what each process of a sharded run will need for its longest rows.

    Raises ConfigError where that exceeds ``memory_budget``, or cannot be known and one is set.
    """
    if processes.kind != "fsdp2":
        return
    longest = config if config.packing else replace(config, max_length=min(config.max_length, data.longest))
    try:
        found = plan(longest, parallel="fsdp", world_size=processes.size, advice=False)
    except InvalidArgumentError as error:
        if config.memory_budget is not None:
            raise ConfigError(f"- memory_budget: this model cannot be planned in shards: {error}") from error
        console.print(f"note: no memory plan: {error}", highlight=False)
        return
    console.print(found.table(), highlight=False)
    if config.memory_budget is not None and found.total > parse_size(config.memory_budget):
        raise ConfigError(
            f"- memory_budget is {config.memory_budget}, and each of {processes.size} processes needs "
            f"{format_bytes(found.total)} in {found.peak.name}. Take more processes, lower per_device_train_batch_size "
            "or max_length, or turn on gradient_checkpointing."
        )
