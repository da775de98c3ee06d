"""leantune: full-parameter fine-tuning in little more than the memory of the weights.

The names below are imported on first use, so that ``import leantune`` needs torch alone.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "TernaryAdamW": "leantune.optim.ternary_adamw",
    "Lomo": "leantune.optim.lomo",
    "AdaLomo": "leantune.optim.adalomo",
    "TacoOneSparse": "leantune.optim.taco_one_sparse",
    "AdamW": "leantune.optim.adamw",
    "FusedBackward": "leantune.backward.fused",
    "replicate": "leantune.backward.reduction",
    "LossScale": "leantune.backward.scaling",
    "apply_velora": "leantune.activations.velora.apply",
    "apply_exact_savings": "leantune.activations.exact.apply",
    "linear_cross_entropy": "leantune.activations.loss",
    "shift_labels": "leantune.activations.loss",
    "attach": "leantune.training.attach",
    "plan": "leantune.training.planning.plan",
    "profile": "leantune.training.profiling.profile",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'leantune' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
