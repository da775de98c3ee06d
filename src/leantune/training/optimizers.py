"""The optimizer a config names, over the model's trainable parameters."""

from typing import Any

from torch import nn

import leantune as lt
from leantune.errors import ConfigError
from leantune.optim.base import LeanOptimizer
from leantune.training.config import TrainConfig


def build_optimizer(config: TrainConfig, model: nn.Module) -> LeanOptimizer:
    """One of leantune's optimizers; vectors (norms, biases) get no weight decay, as in transformers."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    matrices = {"params": [pair for pair in named if pair[1].dim() >= 2], "weight_decay": config.weight_decay}
    vectors = {"params": [pair for pair in named if pair[1].dim() < 2], "weight_decay": 0.0}
    groups = [group for group in (matrices, vectors) if group["params"]]
    shared: dict[str, Any] = {"lr": config.rate, "rounding": config.rounding, "seed": config.seed}
    adam = {key: config.extra[key] for key in ("adam_beta1", "adam_beta2", "adam_epsilon") if key in config.extra}
    betas = (float(adam.get("adam_beta1", config.betas[0])), float(adam.get("adam_beta2", config.betas[1])))
    moments = {"betas": betas, "eps": float(adam.get("adam_epsilon", 1e-8)), "master_bits": config.master_bits}
    if config.optim in ("lomo", "adalomo") and (adam or config.master_bits is not None):
        ignored = [*adam, *(["master_bits"] if config.master_bits is not None else [])]
        raise ConfigError(f"- {config.optim} has no {', '.join(ignored)}; it would be ignored: leave it out")
    if config.optim == "lomo":
        return lt.Lomo(groups, **shared)
    if config.optim == "adalomo":
        return lt.AdaLomo(groups, **shared)
    if config.optim == "adamw":
        return lt.AdamW(groups, **shared, **moments)
    ternary = {key: getattr(config, key) for key in ("carry_rank", "momentum_planes", "block_size")}
    return lt.TernaryAdamW(groups, **shared, **moments, **ternary)
