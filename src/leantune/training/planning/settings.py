"""What a training config says, as the closed form takes it."""

from dataclasses import dataclass
from typing import Any

from leantune.memory.closed_form.settings import RunSettings
from leantune.training.config import TrainConfig


@dataclass(frozen=True)
class BatchShape:
    """The largest micro-batch of a run: rows, tokens a row, and whether attention gets a mask."""

    rows: int
    length: int
    padded: bool


def batch_shape(config: TrainConfig, longest: int, padded: bool) -> BatchShape:
    """Of a run whose longest row has ``longest`` tokens; ``padded``: its rows differ in length.

    Rows of one length, and rows alone, need no mask. TRL lays packed rows out as one row, with a mask that keeps them
    apart.
    """
    rows = config.per_device_train_batch_size
    if config.packing:
        return BatchShape(1, rows * config.max_length, True)
    return BatchShape(rows, longest, padded and rows > 1)


def settings_of(config: TrainConfig, batch: BatchShape | None = None, *, cuda: bool = True) -> RunSettings:
    """What a config says of memory. ``batch``: by default rows of up to ``max_length``, padded or packed."""
    batch = batch or batch_shape(config, config.max_length, padded=True)
    return RunSettings(
        batch_size=batch.rows,
        length=batch.length,
        padded=batch.padded,
        micro_batches=config.gradient_accumulation_steps,
        method="full" if config.method == "auto" else config.method,
        dtype=config.dtype,
        optim=config.optim,
        optimizer_options=_options(config),
        fused=config.fused,
        two_passes=config.fused and config.clip_mode == "global",
        accumulate=config.accumulate,
        exact_loss="loss" in config.chosen_savings,
        swiglu="swiglu" in config.chosen_savings,
        dropout="dropout" in config.chosen_savings,
        shared_adapter_input="shared_adapter_input" in config.chosen_savings,
        checkpoint_every=config.checkpoint_every,
        lora_rank=config.lora_r,
        lora_targets=config.lora_target_modules,
        lora_dropout=config.lora_dropout,
        velora_targets=tuple(config.velora_target_modules or ()),
        velora_groups=config.velora_num_groups,
        cuda=cuda,
    )


def _options(config: TrainConfig) -> dict[str, Any]:
    """Settings of an optimizer that change its states."""
    names = {
        "ternary_adamw": ("carry_rank", "momentum_planes", "block_size", "master_bits"),
        "adamw": ("master_bits",),
    }.get(config.optim, ())
    return {name: getattr(config, name) for name in names}
