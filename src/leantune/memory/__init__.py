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

from leantune.memory.measured.process import ProcessMemory, process_peak, reset_process_peak
from leantune.memory.measured.timeline import MemoryTimeline
from leantune.memory.measured.tracker import MemoryTracker, track
from leantune.memory.parts import LABELS, PARTS
from leantune.memory.reports.calibration import Calibration, read_calibration
from leantune.memory.sizes import format_bytes, parse_size
from leantune.memory.traced.plan import Plan, plan_run

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
