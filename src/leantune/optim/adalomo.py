"""AdaLomo (Lv et al. 2023, arXiv 2310.10195): Lomo with a factored second moment and an update scaled to the weight.

    r = b r + (1 - b) mean over columns of (g^2 + eps0);   c likewise over rows;   b = 1 - t^decay_rate
    v = r c / mean(r);   u = g / sqrt(v)
    w = w - lr u / max(1, RMS(u) / clip_rms) * max(eps1, RMS(w))

Vectors keep v itself. The scale is per tensor, so one backward is enough.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from leantune.codec.tiles import Tile, matrix_shape, row_dimensions, tiles
from leantune.errors import InvalidArgumentError
from leantune.optim.base import LeanOptimizer, check_common
from leantune.optim.gradient import Gradient, gradient_tiles
from leantune.optim.report import Spec, StateLayout
from leantune.optim.row_shard import RowShard
from leantune.optim.weights import WeightMatrix


def factored_direction(grad: Tensor, rows: Tensor, cols: Tensor, mean_row: Tensor) -> Tensor:
    """u = g / sqrt(r c / mean(r)) for a tile: ``grad`` fp32 (a, b), ``rows`` (a,), ``cols`` (b,)."""
    return grad * (rows / mean_row).rsqrt().unsqueeze(1) * cols.rsqrt()


class AdaLomo(LeanOptimizer):
    """Adaptive rule with rows + cols fp32 numbers of state a matrix (vectors: 4 bytes a parameter).

    Args:
        params: parameters, named parameters or groups.
        lr: relative to the RMS of each weight tensor (the paper: 5e-4 for fine-tuning).
        weight_decay: decoupled.
        eps: (added to g^2, least RMS of a weight tensor in the scale).
        clip_rms: the update's RMS is brought down to this before scaling.
        decay_rate: exponent of t in b_t = 1 - t^decay_rate; at most 0.
        rounding, seed: as in TernaryAdamW.

    Raises:
        InvalidArgumentError, InvalidTypeError: before anything is changed.
    """

    structural = ()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 5e-4,
        *,
        weight_decay: float = 0.0,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_rms: float = 1.0,
        decay_rate: float = -0.8,
        rounding: str | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "eps": eps, "clip_rms": clip_rms, "decay_rate": decay_rate}
        super().__init__(params, defaults | {"rounding": rounding, "seed": seed})

    def _check_group(self, group: dict[str, Any]) -> None:
        check_common(group)
        eps = group["eps"]
        if not isinstance(eps, tuple | list) or len(eps) != 2 or not all(float(value) > 0 for value in eps):
            raise InvalidArgumentError(f"eps is {eps!r}; it must be two positive numbers, for example (1e-30, 1e-3).")
        if not float(group["clip_rms"]) > 0:
            raise InvalidArgumentError(f"clip_rms is {group['clip_rms']}; it must be above 0.")
        if not float(group["decay_rate"]) <= 0:
            raise InvalidArgumentError(f"decay_rate is {group['decay_rate']}; it must be at most 0 (the paper: -0.8).")

    def _layout(self, param: Tensor, group: dict[str, Any]) -> StateLayout:
        if param.dim() < 2:
            return StateLayout("exact fp32", "vector", {"variance": (tuple(param.shape), torch.float32)})
        factors: dict[str, Spec] = {
            "variance_rows": (row_dimensions(param.shape), torch.float32),
            "variance_columns": (matrix_shape(param.shape)[1:], torch.float32),
        }
        replicated = frozenset({"variance_columns"})
        return StateLayout("factored", "row and column means of the second moment", factors, replicated)

    def _apply(
        self, shard: RowShard, grad: Gradient, group: dict[str, Any], state: dict[str, Any], grad_scale: float, key: int
    ) -> None:
        weight = WeightMatrix(shard, group["rounding"], None, key)
        beta = 1 - float(int(state["step"])) ** float(group["decay_rate"])
        gradient = _Gradient(grad, grad_scale, shard)
        if "variance" in state:
            variance = state["variance"].view(grad.shape)
            gradient.average(variance, beta, group["eps"][0])
        else:
            row_means, column_means = state["variance_rows"].view(-1), state["variance_columns"]
            gradient.average_factors(row_means, column_means, beta, group["eps"][0])
            mean = shard.total(row_means.sum()) / shard.all_rows

        def directions() -> Iterator[tuple[Tile, Tensor]]:
            for tile, part in gradient.tiles():
                if "variance" in state:
                    yield tile, part / tile.of(variance).sqrt()
                else:
                    of_rows, of_columns = row_means[tile.top : tile.bottom], column_means[tile.left : tile.right]
                    yield tile, factored_direction(part, of_rows, of_columns, mean)

        lr = float(group["lr"])
        update_rms = gradient.rms(direction for _, direction in directions())
        rows, cols = grad.shape
        weight_rms = gradient.rms(weight.read(tile) for tile in tiles(rows, cols, column_unit=128))
        scale = lr * max(group["eps"][1], weight_rms) / max(1.0, update_rms / group["clip_rms"])
        for tile, direction in directions():
            values = weight.read(tile).mul_(1 - lr * group["weight_decay"])
            weight.write(tile, values.sub_(direction, alpha=scale))


class _Gradient:
    """The (rows, cols) of a gradient that this process holds, read in fp32 tiles."""

    def __init__(self, matrix: Gradient, scale: float, shard: RowShard) -> None:
        self._matrix = matrix
        self._scale = scale
        self._shard = shard

    def tiles(self) -> Iterator[tuple[Tile, Tensor]]:
        for tile, part in gradient_tiles(self._matrix, column_unit=128):
            yield tile, part.float().contiguous() * self._scale

    def average(self, variance: Tensor, beta: float, eps: float) -> None:
        for tile, part in self.tiles():
            tile.of(variance).mul_(beta).add_(part.square_().add_(eps), alpha=1 - beta)

    def average_factors(self, rows: Tensor, cols: Tensor, beta: float, eps: float) -> None:
        row_sums, col_sums = torch.zeros_like(rows), torch.zeros_like(cols)
        for tile, part in self.tiles():
            square = part.square_().add_(eps)
            row_sums[tile.top : tile.bottom] += square.sum(dim=1)
            col_sums[tile.left : tile.right] += square.sum(dim=0)
        rows.mul_(beta).add_(row_sums, alpha=(1 - beta) / cols.numel())
        cols.mul_(beta).add_(self._shard.total(col_sums), alpha=(1 - beta) / self._shard.all_rows)

    def rms(self, parts: Iterator[Tensor]) -> float:
        """Root mean square of what ``parts`` are the tiles of, over all rows of the parameter."""
        total = torch.zeros((), dtype=torch.float64, device=self._shard.matrix.device)
        for part in parts:
            total += torch.linalg.vector_norm(part).double().square()
        return float(self._shard.total(total) / max(self._shard.all_rows * self._matrix.shape[1], 1)) ** 0.5
