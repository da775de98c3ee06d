"""AdamW with exact fp32 states (Loshchilov and Hutter 2019): the rule torch has, walked in tiles and usable inside
backward.

m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
w = w (1 - lr weight_decay) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from leantune.optim.base import LeanOptimizer, check_betas, check_common
from leantune.optim.gradient import Gradient, gradient_tiles
from leantune.optim.report import StateLayout
from leantune.optim.row_shard import RowShard
from leantune.optim.weights import WeightMatrix, master_spec


def adamw_direction(
    grad: Tensor, momentum: Tensor, variance: Tensor, beta1: float, beta2: float, step: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """AdamW's pure rule: (direction, m, v) from g, m and v, all fp32 and of one shape; the moments are new tensors."""
    momentum = torch.lerp(momentum, grad, 1 - beta1)
    variance = torch.mul(variance, beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = variance.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
    return torch.div(momentum, denominator, out=denominator).mul_(1 / (1 - beta1**step)), momentum, variance


class AdamW(LeanOptimizer):
    """AdamW with fp32 states (8 bytes a parameter) and, for weights under 32 bits, stochastic rounding.

    Arguments as in ``torch.optim.AdamW``, and ``rounding``, ``master_bits``, ``seed`` as in TernaryAdamW.

    Raises:
        InvalidArgumentError, InvalidTypeError: before anything is changed.
    """

    structural = ("master_bits",)
    gradient_response = "normalised"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        rounding: str | None = None,
        master_bits: int | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"rounding": rounding, "master_bits": master_bits, "seed": seed})

    def _check_group(self, group: dict[str, Any]) -> None:
        check_common(group)
        check_betas(group)

    def _layout(self, param: Tensor, group: dict[str, Any]) -> StateLayout:
        shape = tuple(param.shape)
        moments = dict.fromkeys(("momentum", "variance"), (shape, torch.float32))
        return StateLayout(
            "exact fp32", "AdamW's moments", moments | master_spec(shape, param.dtype, group["master_bits"])
        )

    def _apply(
        self, shard: RowShard, grad: Gradient, group: dict[str, Any], state: dict[str, Any], grad_scale: float, key: int
    ) -> None:
        weight = WeightMatrix(shard, group["rounding"], state.get("weight_remainder"), key)
        momentum, variance = state["momentum"].view(grad.shape), state["variance"].view(grad.shape)
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        for tile, part in gradient_tiles(grad, column_unit=128):
            g = part.float() * grad_scale
            direction, m, v = adamw_direction(
                g, tile.of(momentum), tile.of(variance), beta1, beta2, int(state["step"]), group["eps"]
            )
            tile.of(momentum).copy_(m)
            tile.of(variance).copy_(v)
            weight.write(tile, weight.read(tile).mul_(1 - lr * group["weight_decay"]).sub_(direction, alpha=lr))
