"""What a config needs: in closed form, or from a step on fake tensors where that does not know it."""

from typing import Any

from leantune.errors import InvalidArgumentError
from leantune.memory.budget.model_files import read_config
from leantune.memory.budget.run_stages import Stage, StagedBytes, peak_stage, stage_bytes
from leantune.memory.budget.sharding import ALONE, Parallel
from leantune.memory.closed_form.model_shape import ModelShape
from leantune.memory.closed_form.settings import RunSettings
from leantune.memory.closed_form.weights import WeightTable
from leantune.training.config import TrainConfig


def needed(config: TrainConfig, described: Any, settings: RunSettings, parallel: Parallel = ALONE) -> Stage:
    """The stage of a run that needs the most. ``described``: the model's sizes (`read_sizes`); ``settings``: what
    ``config`` says.

    Raises InvalidArgumentError where neither way knows the run.
    """
    try:
        shape = ModelShape.of_config(described)
        check_known(config, shape, settings)
        return peak_stage(shape, settings, parallel)
    except InvalidArgumentError as error:
        if parallel.ranks > 1:
            raise InvalidArgumentError(
                f"{error}; several processes are planned in closed form alone: plan for one"
            ) from error
    from leantune.memory.traced.traced_stages import traced_stages
    from leantune.training.planning.tiers import traced

    found, model = traced(config, read_config(config.model_name_or_path), settings)
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return traced_stages(found, settings, trained).peak


def closed_form(config: TrainConfig, described: Any, settings: RunSettings, parallel: Parallel = ALONE) -> StagedBytes:
    """Every stage of a run by arithmetic alone; InvalidArgumentError for a model or setting it does not know."""
    shape = ModelShape.of_config(described)
    check_known(config, shape, settings)
    return stage_bytes(shape, settings, parallel)


def check_known(config: TrainConfig, shape: ModelShape, settings: RunSettings) -> WeightTable:
    """The weights of a run in closed form; InvalidArgumentError where it is not known there."""
    if config.bf16:
        raise InvalidArgumentError("autocast (bf16: true) casts weights as it goes: not in closed form")
    return WeightTable(shape, settings)
