"""The plan of a sharded run: what one process of several holds, in closed form."""

from dataclasses import replace

from rich.console import Console

from leantune.errors import ConfigError, InvalidArgumentError
from leantune.training.config import TrainConfig
from leantune.training.data.load import PreparedData
from leantune.training.parallel.processes import Processes
from leantune.training.planning.plan import plan


def show_rank_plan(config: TrainConfig, data: PreparedData, processes: Processes, console: Console) -> None:
    """Print what each process of a sharded run will need for its longest rows.

    Raises ConfigError where that cannot be known and there is a ``memory_budget`` to hold it against.
    """
    if processes.kind != "fsdp2":
        return
    longest = config if config.packing else replace(config, max_length=min(config.max_length, data.longest))
    try:
        found = plan(longest, parallel="fsdp2", world_size=processes.size, advice=False)
    except InvalidArgumentError as error:
        if config.memory_budget is not None:
            raise ConfigError(f"- memory_budget: this model cannot be planned in shards: {error}") from error
        console.print(f"note: no memory plan: {error}", highlight=False)
        return
    console.print(found.table(), highlight=False)
