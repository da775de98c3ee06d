"""Arms of ternary_ablation.py that change the scheme itself: `TernaryAdamW` in plain torch with one function or
constant of it replaced while it steps."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import leantune as lt
from leantune.codec import column_factors, log_ternary, ternary
from leantune.kernels import native
from leantune.optim import ternary_adamw
from leantune.optim.sampling import every_step
from leantune.optim.ternary_adamw import normalised_momentum
from quality.methods import BETAS, WEIGHT_DECAY, Build


class _Patched(lt.TernaryAdamW):
    replaced: tuple[Any, str, Any]

    def step(self, closure: Any = None) -> Any:
        module, name, value = self.replaced
        with native.reference_rule(), mock.patch.object(module, name, value):
            return super().step(closure)


def _with(module: Any, name: str, value: Any) -> Build:
    def build(model: nn.Module, lr: float, weights: str, seed: int) -> torch.optim.Optimizer:
        optimizer = _Patched(model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, seed=seed)
        optimizer.replaced = (module, name, value)
        return optimizer

    return build


def _release(share: float) -> Build:
    """The step contains this share of what storing dropped: 1 is the scheme, 0 loses it."""

    def released_step(momentum: Tensor, decoded: Tensor, beta1: float) -> Tensor:
        return torch.sub(momentum, decoded).mul_(share * beta1 / (1 - beta1)).add_(momentum)

    return _with(ternary_adamw, "released_step", released_step)


def _bounded(bound: float) -> Build:
    """|n| is at most this."""

    def rule(
        grad: Tensor, momentum: Tensor, variance: Tensor, beta1: float, beta2: float, bias: float, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        normalised, _, variance = normalised_momentum(grad, momentum, variance, beta1, beta2, bias, eps)
        normalised.clamp_(-bound, bound)
        return normalised, torch.lerp(momentum, normalised, 1 - beta1), variance

    return _with(ternary_adamw, "normalised_momentum", rule)


def _no_factors(self: column_factors.ColumnFactors, means: Tensor) -> None:
    """f is 1 in every live column."""
    self.live = self.times = self.over = (means > 0).float()


def _ratio_of_spreads(offset: Tensor, average: Tensor, counts: Tensor, trits: Tensor, previous: Tensor) -> Tensor:
    """The log-step as std(L(v)) / std(x) instead of the slope."""
    spread = trits.square().sum(dim=-1).div_(counts).sub_((trits.sum(dim=-1) / counts).square())
    square = offset.square().sum(dim=-1).div_(counts).sub_(average.square()).clamp_(min=0)
    first = square.sqrt().mul_(log_ternary.FIRST_STEP)
    followed = torch.where(spread > 0, (square / spread).sqrt(), previous.float())
    step = torch.where(previous == 0, first, followed)
    return step.clamp_(log_ternary.MIN_STEP, log_ternary.MAX_STEP).to(torch.bfloat16)


def _fixed_step(offset: Tensor, average: Tensor, counts: Tensor, trits: Tensor, previous: Tensor) -> Tensor:
    """The log-step is half an octave everywhere."""
    return torch.full_like(previous, 0.5)


def _no_trits(
    values: Tensor, live: Tensor, trits: Tensor, previous: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """v is f times the mean of its block."""
    mean = values.sum(dim=-1) / live.sum(dim=-1).clamp_(min=1)
    return torch.zeros_like(values), mean.to(torch.bfloat16), torch.full_like(previous, 1.0)


SCHEME_ARMS: dict[str, Build] = {
    "threshold-.45": _with(ternary, "THRESHOLD", 0.45),
    "threshold-.8": _with(ternary, "THRESHOLD", 0.8),
    "release-0": _release(0.0),
    "release-.5": _release(0.5),
    "n-at-most-3": _bounded(3.0),
    "n-at-most-10": _bounded(10.0),
    "no-column-factors": _with(column_factors.ColumnFactors, "__init__", _no_factors),
    "no-variance-trits": _with(log_ternary, "encode", _no_trits),
    "log-step-ratio": _with(log_ternary, "_next_step", _ratio_of_spreads),
    "log-step-.5": _with(log_ternary, "_next_step", _fixed_step),
    "new-V-every-step": _with(ternary_adamw, "REFRESH_EVERY", 1),
    "store-v-every-step": _with(ternary_adamw, "sampling", every_step),
}
"""Momentum's threshold in units of the block's root mean square; the share of what storing drops that a step releases;
a bound on |n|; v without column factors, without trits; other rules for its log-step; V worked out, v
stored every step."""
