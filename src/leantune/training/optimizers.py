"""The optimizer a config names, over the model's trainable parameters."""

from typing import TYPE_CHECKING, Any

from torch import nn

import leantune as lt
from leantune.optim.base import LeanOptimizer
from leantune.training.config import TrainConfig

if TYPE_CHECKING:
    from leantune.training.trainer import LeanTrainer


def plain_optimizer(trainer: "LeanTrainer") -> Any:
    """A trainer's optimizer itself, without what accelerate wraps around it."""
    optimizer: Any = trainer.optimizer
    return getattr(optimizer, "optimizer", optimizer)


def build_optimizer(config: TrainConfig, model: nn.Module) -> LeanOptimizer:
    """One of leantune's optimizers; vectors (norms, biases) get no weight decay, as in transformers."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    matrices = {"params": [pair for pair in named if pair[1].dim() >= 2], "weight_decay": config.weight_decay}
    vectors = {"params": [pair for pair in named if pair[1].dim() < 2], "weight_decay": 0.0}
    groups = [group for group in (matrices, vectors) if group["params"]]
    shared: dict[str, Any] = {"lr": config.rate, "rounding": config.rounding, "seed": config.seed}
    moments = {"betas": config.betas, "eps": config.adam_epsilon, "master_bits": config.master_bits}
    if config.optim == "lomo":
        return lt.Lomo(groups, **shared)
    if config.optim == "adalomo":
        return lt.AdaLomo(groups, **shared)
    if config.optim == "taco_one_sparse":
        return lt.TacoOneSparse(groups, **shared)
    if config.optim == "adamw":
        return lt.AdamW(groups, **shared, **moments)
    ternary = {key: getattr(config, key) for key in ("carry_rank", "momentum_planes", "block_size")}
    return lt.TernaryAdamW(groups, **shared, **moments, **ternary)
