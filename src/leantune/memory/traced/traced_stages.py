"""The stages of a run whose model is not in closed form, from one step walked on fake tensors."""

from leantune.memory.budget.run_stages import LIBRARIES_BYTES, Stage, StagedBytes, with_overhead
from leantune.memory.closed_form.settings import RunSettings
from leantune.memory.parts import OPTIMIZER_STATES, WEIGHTS
from leantune.memory.reports.stages import (
    BACKWARD_STAGE,
    EVALUATION,
    FIRST_STEP,
    FORWARD_STAGE,
    LOAD,
    RESUME,
    SAVE,
    STEP,
)
from leantune.memory.traced.plan import Plan


def traced_stages(plan: Plan, settings: RunSettings, trained_bytes: int) -> StagedBytes:
    """Stages from ``plan``. ``trained_bytes``: of the weights that are trained.

    A forward is counted at its end; evaluation, which keeps less, is taken for as large.
    """
    weights, states = plan.parts[WEIGHTS], plan.parts[OPTIMIZER_STATES]
    still = {WEIGHTS: weights, OPTIMIZER_STATES: states}
    device = {
        LOAD: {WEIGHTS: weights},
        FORWARD_STAGE: plan.saved,
        BACKWARD_STAGE: plan.at_peak,
        FIRST_STEP: plan.at_peak,
        STEP: plan.at_peak,
        EVALUATION: plan.saved,
        SAVE: still,
        RESUME: still,
    }
    loading = weights if settings.cuda else 0
    host = {LOAD: loading, SAVE: trained_bytes, RESUME: max(loading, states)}
    stages = tuple(
        Stage(name, with_overhead(parts, settings.cuda), LIBRARIES_BYTES + host.get(name, 0))
        for name, parts in device.items()
    )
    return StagedBytes(stages, plan.parts, plan.saved, trained_bytes + states, trained_bytes)
