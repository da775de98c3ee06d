"""What was planned of a profiled run, stage by stage, and what would make it smaller: from the same plan as
``leantune plan``."""

from dataclasses import dataclass
from typing import Any

from leantune.errors import InvalidArgumentError
from leantune.memory import Plan
from leantune.memory.budget.advice import advise, advise_by_parts
from leantune.memory.budget.model_files import read_sizes
from leantune.memory.budget.run_stages import (
    ADAPTERS,
    CALIBRATION,
    COMMUNICATION,
    CONTEXT,
    FRAGMENTATION,
    Stage,
    StagedBytes,
)
from leantune.memory.budget.sharding import ALONE
from leantune.memory.closed_form.model_shape import ModelShape
from leantune.memory.closed_form.settings import RunSettings
from leantune.memory.parts import TEMPORARIES, WEIGHTS
from leantune.memory.reports.stages import EVALUATION, FIRST_STEP, LOAD, RESUME, STEP, TOTAL
from leantune.training.config import TrainConfig
from leantune.training.data.load import PreparedData
from leantune.training.planning.need import closed_form
from leantune.training.planning.settings import BatchShape, batch_shape, settings_of

_NOT_TENSORS = (ADAPTERS, COMMUNICATION, CONTEXT, FRAGMENTATION, CALIBRATION)


@dataclass(frozen=True)
class PlannedRun:
    """A run as it was planned: ``staged`` in closed form (None where its model is not known there), ``step`` from a
    step on fake tensors (None where that cannot be walked)."""

    settings: RunSettings
    shape: ModelShape | None
    staged: StagedBytes | None
    evaluation: Stage | None
    step: Plan | None

    def stages(self) -> dict[str, dict[str, int]]:
        """{stage: {part or "total": bytes of tensors}}, as `stage_rows` takes them; what a device and its allocator add
        is left out. A resumed run is planned with the step that follows."""
        found: dict[str, dict[str, int]] = {}
        if self.staged is not None:
            stages = {stage.name: stage for stage in self.staged.stages}
            if self.evaluation is not None:
                stages[EVALUATION] = self.evaluation
            found = {name: _tensors(stage) for name, stage in stages.items()}
            found[LOAD] = self._loading(found[LOAD], stages[LOAD].parts[ADAPTERS])
            found[RESUME] = max((found[name] for name in (RESUME, FIRST_STEP, STEP)), key=lambda parts: parts[TOTAL])
        if self.step is not None:
            found[STEP] = {**self.step.at_peak, TOTAL: self.step.total}
        return found

    def _loading(self, parts: dict[str, int], adapters: int) -> dict[str, int]:
        """A tracker also sees the empty model that transformers makes before it reads the weights, a tied head apart,
        and, on a GPU, the model on the host: tensors all, of which the device holds nothing. Adapters come later."""
        assert self.shape is not None
        tied = self.shape.vocabulary * self.shape.hidden * self.settings.item_bytes if self.shape.tied else 0
        model = parts[WEIGHTS] - adapters
        beside = model + tied + (model if self.settings.cuda else 0)
        return {**parts, WEIGHTS: model, TEMPORARIES: beside, TOTAL: model + beside}

    def advice(self, parts: dict[str, int], budget: int | None) -> tuple[str, ...]:
        """What would help, cheapest first. ``parts``: bytes at the peak that was measured, for a model that is not in
        closed form."""
        if self.shape is None or self.staged is None:
            return advise_by_parts(self.settings, parts)
        found = advise(self.shape, self.settings, ALONE, self.staged.peak.total, budget)
        return tuple(str(one) for one in found)


def planned_run(config: TrainConfig, data: PreparedData, step: Plan | None, *, cuda: bool) -> PlannedRun:
    """Plan a run for the rows it is given."""
    settings = settings_of(config, batch_shape(config, data.longest, data.padded), cuda=cuda)
    described = read_sizes(config.model_name_or_path)
    try:
        staged = closed_form(config, described, settings)
        held_out = settings_of(config, _evaluated(config, data.held_out), cuda=cuda) if data.held_out else None
        evaluation = None if held_out is None else closed_form(config, described, held_out)
    except InvalidArgumentError:
        return PlannedRun(settings, None, None, None, step)
    found = None
    if evaluation is not None:
        found = next(stage for stage in evaluation.stages if stage.name == EVALUATION)
    return PlannedRun(settings, ModelShape.of_config(described), staged, found, step)


def _evaluated(config: TrainConfig, held_out: Any) -> BatchShape:
    """The largest batch of the held-out loss; held-out rows are never packed."""
    rows = min(config.per_device_train_batch_size, len(held_out))
    lengths = [len(ids) for ids in held_out[:rows]["input_ids"]]
    return BatchShape(rows, max(lengths), rows > 1 and len(set(lengths)) > 1)


def _tensors(stage: Stage) -> dict[str, int]:
    """A stage's tensors by part, adapters among the weights as a tracker sees them, and their sum."""
    parts = {part: size for part, size in stage.parts.items() if part not in _NOT_TENSORS}
    parts[WEIGHTS] += stage.parts[ADAPTERS]
    return {**parts, TOTAL: sum(parts.values())}
