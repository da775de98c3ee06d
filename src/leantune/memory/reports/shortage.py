"""Where memory ran out: what was in use, what asked for more, and who else is on the device."""

from dataclasses import dataclass

import torch

from leantune.errors import MemoryBudgetError
from leantune.memory.measured.machine import ProcessUse, other_processes
from leantune.memory.measured.tracker import MemoryTracker
from leantune.memory.parts import PARTS


@dataclass(frozen=True)
class MemoryShortage:
    """Where memory ran out."""

    stage: str
    message: str
    simulated: bool
    """True: the budget was reached, and the run was stopped there; False: the device itself was full."""
    live: dict[str, int]
    """Bytes of each part in use at that moment."""
    part: str | None = None
    phase: str | None = None
    module: str | None = None
    operator: str | None = None
    asked: int | None = None
    """Bytes of the allocation that failed."""
    others: tuple[ProcessUse, ...] = ()
    snapshot: str | None = None
    """File name of the CUDA allocator's snapshot."""


def shortage_of(
    error: BaseException, stage: str, tracker: MemoryTracker | None, device: torch.device | str
) -> MemoryShortage:
    """Describe an error that `is_out_of_memory`, or a MemoryBudgetError, from the tracker that ran around it."""
    failure = tracker.failure if tracker is not None else None
    simulated = isinstance(error, MemoryBudgetError)
    live = dict.fromkeys(PARTS, 0)
    if tracker is not None and failure is not None:
        live = tracker.timeline().at(failure.event)
    message = str(error).strip().splitlines()
    return MemoryShortage(
        stage=stage,
        message=message[0] if message else type(error).__name__,
        simulated=simulated,
        live=live,
        part=error.part if isinstance(error, MemoryBudgetError) else None,
        phase=failure.phase if failure else None,
        module=failure.module if failure else None,
        operator=failure.operator if failure else None,
        asked=error.size if isinstance(error, MemoryBudgetError) else None,
        others=tuple(other_processes(device)),
    )
