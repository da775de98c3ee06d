"""``method: auto`` of a training run: decided from its data and its device before a weight is loaded; what does not fit
is refused here."""

import dataclasses
import importlib.util
from typing import Any

import numpy
import torch

from leantune.errors import InvalidArgumentError, NotEnoughRoomError
from leantune.memory.budget.advice import advise
from leantune.memory.budget.largest import parameters
from leantune.memory.budget.model_files import read_sizes
from leantune.memory.budget.run_stages import PART_LABELS, Stage
from leantune.memory.budget.sharding import ALONE, Parallel
from leantune.memory.closed_form.model_shape import ModelShape
from leantune.memory.closed_form.settings import RunSettings
from leantune.memory.sizes import format_bytes, parse_size
from leantune.training.config import LORA_METHODS, TrainConfig
from leantune.training.data.load import PreparedData
from leantune.training.planning.need import needed
from leantune.training.planning.recipe import Recipe, choose_recipe
from leantune.training.planning.settings import batch_shape, settings_of

GROUPED_FROM = 1.25
"""Tokens of random batches over tokens of the rows in them, from which batches of like lengths pay."""
FULL_RATES = ((1e9, 5e-5), (10e9, 2e-5), (float("inf"), 1e-5))
"""(up to so many parameters, learning rate) of full fine-tuning: Stanford Alpaca's above 1 billion (2e-5 at 7B, 1e-5 at
13B); below, what this package's own runs take."""
ADAPTER_RATES = ((20e9, 2e-4), (float("inf"), 1e-4))
"""The same for adapters: QLoRA's paper, table 9 (2e-4 at 7B and 13B, 1e-4 at 33B and 65B)."""


def before_the_data(config: TrainConfig) -> TrainConfig:
    """What must be known before rows are read: whether the method is auto (on a GPU it is where none was set, against
    the device's memory), and that max_length is then taken from the rows where none was set."""
    if config.leaves_out("method") and torch.cuda.is_available():
        config = dataclasses.replace(config, method="auto")
    if config.method != "auto":
        return config
    if config.leaves_out("max_length") and not config.streaming:
        config = dataclasses.replace(config, max_length=0)
    return config


def settled(config: TrainConfig, data: PreparedData, spread: Parallel = ALONE) -> tuple[TrainConfig, Recipe | None]:
    """The config a run of ``method: auto`` trains with, and the recipe; any other config as it is, and None.

    Without a budget that is the memory of the GPU; without one of those, method: full.
    """
    if config.method != "auto":
        return config, None
    budget = _budget(config)
    if budget is None:
        note = "method: auto is decided against a memory_budget; without one this is method: full"
        return dataclasses.replace(config, method="full", notes=(*config.notes, note)), None
    described = read_sizes(config.model_name_or_path)

    def need(candidate: TrainConfig) -> tuple[Stage, str]:
        if candidate.method == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
            raise InvalidArgumentError("bitsandbytes is not installed here")
        settings = _settings(candidate, data)
        return needed(candidate, described, settings, spread), settings.where + spread.where

    recipe = choose_recipe(config, need, budget)
    chosen, rate = recipe.rung.config, config.learning_rate
    notes = list(chosen.notes)
    if rate is None and chosen.optim not in ("lomo", "taco_one_sparse"):
        rate = _rate(chosen, described)
    extra = dict(chosen.extra)
    waste = padding(data, chosen.per_device_train_batch_size, chosen.seed)
    if waste >= GROUPED_FROM and not chosen.packing and "train_sampling_strategy" not in extra:
        extra["train_sampling_strategy"] = "group_by_length"
        notes.append(
            f"rows differ in length: random batches would be {100 * (waste - 1):.0f} % padding on top of them, so "
            "batches are made of rows of like length (train_sampling_strategy: group_by_length)"
        )
    ordered = not (chosen.packing or chosen.streaming or data.lengths is None)
    if ordered and not config.sets("longest_first"):
        chosen = dataclasses.replace(chosen, longest_first=True)
    return dataclasses.replace(chosen, extra=extra, notes=tuple(notes), learning_rate=rate), recipe


def refuse_what_does_not_fit(config: TrainConfig, data: PreparedData, spread: Parallel = ALONE) -> None:
    """Hold a run's plan against ``memory_budget`` before a weight is loaded; ``force`` lets it pass with a note.

    Raises NotEnoughRoomError with what is missing, where, and what would make room. A model that only a look at its
    loaded weights can plan is held against it later.
    """
    if config.memory_budget is None:
        return
    budget, settings = parse_size(config.memory_budget), _settings(config, data)
    try:
        described = read_sizes(config.model_name_or_path)
        peak = needed(config, described, settings, spread)
    except InvalidArgumentError:
        return
    if peak.total <= budget:
        return
    part = max(peak.parts, key=lambda name: peak.parts[name])
    text = (
        f"memory_budget is {config.memory_budget}, and the plan needs {format_bytes(peak.total)} in {peak.name} at "
        f"{settings.where}{spread.where}, {format_bytes(peak.parts[part])} of it {PART_LABELS[part]}"
    )
    if config.force:
        data.notes.append(f"{text}; force: true trains all the same")
        return
    try:
        shape = ModelShape.of_config(described)
        helping = [str(advice) for advice in advise(shape, settings, spread, peak.total, budget)]
    except InvalidArgumentError:
        helping = []
    if helping:
        text += ". What would make room:\n" + "\n".join(f"- {one}" for one in helping)
    raise NotEnoughRoomError(f"{text}\nNothing was loaded. --force trains all the same.")


def padding(data: PreparedData, rows: int, seed: int) -> float:
    """Tokens of batches of ``rows`` random rows, each as long as its longest, over the tokens of their rows: 1 where
    all are of one length, or lengths are not known."""
    if data.lengths is None or rows == 1 or len(data.lengths) < 2 * rows:
        return 1.0
    lengths = numpy.asarray(data.lengths)
    order = numpy.random.default_rng(seed).permutation(len(lengths))
    batches = lengths[order[: len(order) // rows * rows]].reshape(-1, rows)
    return float(rows * batches.max(axis=1).sum() / batches.sum())


def _settings(config: TrainConfig, data: PreparedData) -> RunSettings:
    """As this machine runs it, at the largest batch of these rows."""
    batch = batch_shape(config, data.longest, data.padded)
    return settings_of(config, batch, cuda=torch.cuda.is_available())


def _budget(config: TrainConfig) -> int | None:
    if config.memory_budget is not None:
        return parse_size(config.memory_budget)
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return None


def _rate(config: TrainConfig, described: Any) -> float:
    """The learning rate for a method and a number of parameters; by method alone where that is not known."""
    if config.method == "full" and config.optim == "adalomo":
        return config.rate
    try:
        size = parameters(ModelShape.of_config(described))
    except InvalidArgumentError:
        return config.rate
    rates = ADAPTER_RATES if config.method in LORA_METHODS else FULL_RATES
    return next(rate for most, rate in rates if size <= most)
