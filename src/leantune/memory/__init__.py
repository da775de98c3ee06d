"""What training needs (plan), what it used (tracker, process), and pictures of it.

In a training run::

    plan = plan_run(model, optimizers, batch_size=2, length=512, fused=True, loss=my_loss)  # before training
    plan.save(output_dir)                             # memory_plan.json; plan.table() for the header
    tracker = MemoryTracker(model, optimizers).start()          # around one step, say the second
    ...                                               # forward, backward, optimizer.step(), zero_grad()
    tracker.stop()
    timeline = tracker.timeline()                     # .part_peaks(), .at_peak(), .peak_bytes
    plot_memory(timeline, output_dir / "memory.png", plan_total=plan.total)
    reset_process_peak(); ...; process_peak().peak    # the operating system's view
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leantune.memory.measured.process import ProcessMemory, process_peak, reset_process_peak
    from leantune.memory.measured.timeline import MemoryTimeline
    from leantune.memory.measured.tracker import MemoryTracker, track
    from leantune.memory.parts import LABELS, PARTS
    from leantune.memory.reports.calibration import Calibration, read_calibration
    from leantune.memory.sizes import format_bytes, parse_size
    from leantune.memory.traced.plan import Plan, plan_run

_HOMES = {
    "ProcessMemory": "leantune.memory.measured.process",
    "process_peak": "leantune.memory.measured.process",
    "reset_process_peak": "leantune.memory.measured.process",
    "MemoryTimeline": "leantune.memory.measured.timeline",
    "MemoryTracker": "leantune.memory.measured.tracker",
    "track": "leantune.memory.measured.tracker",
    "LABELS": "leantune.memory.parts",
    "PARTS": "leantune.memory.parts",
    "Calibration": "leantune.memory.reports.calibration",
    "read_calibration": "leantune.memory.reports.calibration",
    "format_bytes": "leantune.memory.sizes",
    "parse_size": "leantune.memory.sizes",
    "Plan": "leantune.memory.traced.plan",
    "plan_run": "leantune.memory.traced.plan",
}
"""Imported on first use: planning in closed form needs no torch."""

__all__ = [
    "LABELS",
    "PARTS",
    "Calibration",
    "MemoryTimeline",
    "MemoryTracker",
    "Plan",
    "ProcessMemory",
    "format_bytes",
    "parse_size",
    "plan_run",
    "process_peak",
    "read_calibration",
    "reset_process_peak",
    "track",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'leantune.memory' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
