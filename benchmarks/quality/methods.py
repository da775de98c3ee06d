"""The optimizers compared: one name, one constructor, and where its search of the learning rate begins."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import leantune as lt

WEIGHT_DECAY = 0.01
BETAS = (0.9, 0.999)
Build = Callable[[nn.Module, float, str, int], torch.optim.Optimizer]
"""(model, lr, weights: "fp32" or "bf16", seed) -> optimizer."""


@dataclass(frozen=True)
class Method:
    """``offset``: the search starts this many factors of 2 above the task's rate for AdamW."""

    build: Build
    offset: int = 0
    only: tuple[str, ...] = ("fp32", "bf16")
    """Weight formats it is run on."""
    fine_tuning: bool = False
    """Run only where training begins with a trained model."""


def adamw(model: nn.Module, lr: float, weights: str, seed: int, beta1: float = BETAS[0]) -> torch.optim.Optimizer:
    """torch's AdamW on fp32 weights. On bf16 weights it would stall by rounding (and keep bf16 states): ours, with fp32
    states and stochastic rounding."""
    betas = (beta1, BETAS[1])
    if weights == "fp32":
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=WEIGHT_DECAY)
    return lt.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=WEIGHT_DECAY, seed=seed)


def ternary(**settings: Any) -> Build:
    def build(model: nn.Module, lr: float, weights: str, seed: int) -> torch.optim.Optimizer:
        merged = {"betas": BETAS, "weight_decay": WEIGHT_DECAY, "seed": seed} | settings
        return lt.TernaryAdamW(model.parameters(), lr=lr, **merged)

    return build


def _one_sparse(model: nn.Module, lr: float, weights: str, seed: int) -> torch.optim.Optimizer:
    return lt.TacoOneSparse(model.parameters(), lr=lr, seed=seed)


def _adamw_without_momentum(model: nn.Module, lr: float, weights: str, seed: int) -> torch.optim.Optimizer:
    return adamw(model, lr, weights, seed, beta1=0.0)


def _adamw_plain(model: nn.Module, lr: float, weights: str, seed: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)


def _torchao(name: str) -> Build:
    def build(model: nn.Module, lr: float, weights: str, seed: int) -> torch.optim.Optimizer:
        import torchao.optim

        return getattr(torchao.optim, name)(
            model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, bf16_stochastic_round=weights == "bf16"
        )

    return build


def _bitsandbytes_adamw(model: nn.Module, lr: float, weights: str, seed: int) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)


def _lion(model: nn.Module, lr: float, weights: str, seed: int) -> torch.optim.Optimizer:
    """Its paper: rates 3 to 10 times smaller than AdamW's, the decay as much larger."""
    import bitsandbytes

    return bitsandbytes.optim.Lion32bit(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=8 * WEIGHT_DECAY)


def _adafactor(model: nn.Module, lr: float, weights: str, seed: int) -> torch.optim.Optimizer:
    """With a rate of ours: its own schedule would be another experiment."""
    from transformers import Adafactor

    return Adafactor(model.parameters(), lr=lr, relative_step=False, scale_parameter=False, weight_decay=WEIGHT_DECAY)


def _sgd(model: nn.Module, lr: float, weights: str, seed: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


METHODS: dict[str, Method] = {
    "adamw": Method(adamw),
    "ternary-r4": Method(ternary(carry_rank=4)),
    "ternary-r0": Method(ternary(carry_rank=0)),
    "ternary-2p-r4": Method(ternary(carry_rank=4, momentum_planes=2)),
    "ternary-2p-r0": Method(ternary(carry_rank=0, momentum_planes=2)),
    "torchao-8bit": Method(_torchao("AdamW8bit")),
    "torchao-4bit": Method(_torchao("AdamW4bit")),
    "bnb-8bit": Method(_bitsandbytes_adamw),
    "adafactor": Method(_adafactor),
    "lion": Method(_lion, offset=-3),
    "laprop": Method(ternary(states="exact")),
    "adamw-beta1-0": Method(_adamw_without_momentum, offset=-1),
    "adamw-plain": Method(_adamw_plain, only=("bf16",)),
    "one-sparse": Method(_one_sparse, offset=2, fine_tuning=True),
    "sgd": Method(_sgd, offset=5),
}
PEERS = ("torchao-8bit", "torchao-4bit", "bnb-8bit", "adafactor", "lion", "sgd")
"""Of these the strongest three of each task and batch size get three seeds, beside AdamW and the ternary ones."""
TIERS = (
    ("adamw", "ternary-r4"),
    ("ternary-r0", "ternary-2p-r4"),
    ("torchao-8bit", "torchao-4bit", "bnb-8bit"),
    ("adafactor", "lion", "laprop", "adamw-beta1-0", "adamw-plain", "one-sparse", "sgd", "ternary-2p-r0"),
)
"""The order of work: a tier is finished on every task before the next begins."""
SEEDED = ("adamw", "ternary-r4", "ternary-r0", "ternary-2p-r4")
"""Always three seeds."""


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        # torchao keeps the rate in a tensor and refuses another kind.
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all state tensors, packed ones by what is inside; a tensor shared between parameters counts once."""
    found: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            for item in value.values():
                visit(item)
        elif type(value) is not Tensor and hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                visit(getattr(value, name))
        elif isinstance(value, Tensor) and value.numel():
            found[value.data_ptr()] = value.numel() * value.element_size()

    for state in optimizer.state.values():
        visit(state)
    return sum(found.values())
