"""Lomo (Lv et al. 2023, arXiv 2306.09782): w = w - lr g, with no state at all; meant to run inside backward."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from leantune.optim.base import LeanOptimizer
from leantune.optim.gradient import Gradient, gradient_tiles
from leantune.optim.report import StateLayout
from leantune.optim.row_shard import RowShard
from leantune.optim.weights import WeightMatrix


class Lomo(LeanOptimizer):
    """Stochastic gradient descent without momentum: no state but a step count (which seeds stochastic rounding).

    Args:
        params: parameters, named parameters or groups.
        lr: learning rate; there is no default that suits (the paper uses 3e-2 to 5e-2 with global clipping at 1.0).
        weight_decay: decoupled: w is first multiplied by 1 - lr * weight_decay.
        rounding, seed: as in TernaryAdamW. With "nearest", bfloat16 weights stall: most updates round away.

    Raises:
        InvalidArgumentError, InvalidTypeError: before anything is changed.
    """

    structural = ()
    gradient_response = "linear"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        weight_decay: float = 0.0,
        rounding: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "rounding": rounding, "seed": seed})

    def _layout(self, param: Tensor, group: dict[str, Any]) -> StateLayout:
        return StateLayout("none", "Lomo keeps no state", {})

    def _apply(
        self, shard: RowShard, grad: Gradient, group: dict[str, Any], state: dict[str, Any], grad_scale: float, key: int
    ) -> None:
        weight = WeightMatrix(shard, group["rounding"], None, key)
        lr = float(group["lr"])
        for tile, part in gradient_tiles(grad, column_unit=128):
            values = weight.read(tile).mul_(1 - lr * group["weight_decay"])
            weight.write(tile, values.sub_(part.float() * grad_scale, alpha=lr))
