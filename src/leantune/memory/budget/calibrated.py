"""A plan corrected by what a profile measured on the same machine (`leantune.memory.reports.calibration`)."""

from dataclasses import replace

from leantune.memory.budget.run_stages import CALIBRATION, CONTEXT, FRAGMENTATION, Stage, StagedBytes
from leantune.memory.reports.calibration import Calibration


def calibrated(staged: StagedBytes, calibration: Calibration) -> StagedBytes:
    """Every stage's tensors times what the profile found against its own plan; the device's context and fragmentation
    replaced by what the allocator there used beside tensors, where both are of a GPU."""
    on_gpu = calibration.machine.get("device") == "cuda"
    return replace(staged, stages=tuple(_stage(stage, calibration, on_gpu) for stage in staged.stages))


def _stage(stage: Stage, calibration: Calibration, on_gpu: bool) -> Stage:
    parts = dict(stage.parts)
    tensors = sum(parts.values()) - parts[CONTEXT] - parts[FRAGMENTATION]
    parts[CALIBRATION] = int(tensors * ((calibration.ratio(stage.name) or 1.0) - 1.0))
    if on_gpu and parts[CONTEXT] and calibration.beside_tensors is not None:
        parts[CONTEXT], parts[FRAGMENTATION] = calibration.beside_tensors, 0
    return replace(stage, parts=parts)


def calibration_note(calibration: Calibration) -> str:
    """Where the correction comes from and how far that profile's plan was off."""
    where = f"{calibration.run.get('model', 'a run')} at {calibration.run.get('where', 'its batch')}"
    if calibration.median_error is None or calibration.worst_error is None:
        return f"calibrated by a profile of {where}, which had no plan to compare with"
    return (
        f"calibrated by a profile of {where}: its plan was off by {100 * calibration.median_error:.1f} % (median of "
        f"the stages), {100 * calibration.worst_error:.1f} % at worst"
    )
