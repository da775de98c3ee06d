"""TacoOneSparse: one entry a column moves, chosen from a few remembered gradients a column (TACO, arXiv 2610.02199).

W is m x n and acts on column vectors (W x), so column j belongs to input feature j: ``param[:, j]`` of an nn.Linear's
(out, in) weight. Measure a matrix by n/m times the largest absolute column sum, the 1->1 operator norm normalised for
its dimensions: the steepest descent for the gradient G then has a single entry a column, where |G| is largest.

    h    = beta h + (1 - beta) G            at the rows that the column remembers (k slots)
    r    = the row outside the slots with the largest |G|; it takes the slot of the smallest |h|,
           with h = (1 - beta) G, if that is larger (an empty slot counts as 0)
    i*   = the remembered row with the largest |h|, the lowest of several
    W    = W (1 - lr weight_decay);   W[i*, j] -= lr (m / n) sign(h[i*])

The step is the paper's. What it keeps between steps is not published in full (number of slots, decay, replacement, FP8
scaling, learning rate): those are leantune's choices, measured in docs/taco_one_sparse.md.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leantune.codec.counter_hash import high_half, random_bits, splitmix64
from leantune.codec.float8 import decode_columns, encode_columns
from leantune.codec.tiles import TILE_ELEMENTS, Stack, Tile, stack_of, tiles
from leantune.errors import InvalidArgumentError
from leantune.optim.base import LeanOptimizer, check_common
from leantune.optim.report import StateLayout
from leantune.optim.row_shard import RowShard
from leantune.optim.weights import WeightMatrix

MAX_COLUMN_BYTES = 90
"""State of a column, at most."""
MAX_SLOTS = 28
"""Slots a column: 28 x (2 bytes of row + 1 of value) + 1 of scale = 85 bytes."""
PANEL_COLUMNS = 2048
"""Columns walked together; a multiple of the 128 columns that share a key of random bits."""
_INT16_ROWS = 1 << 16
_HASH_BLOCK = 128


def slot_count(rows: int, wanted: int) -> int:
    """Slots a column of ``rows`` rows keeps: ``wanted``, or as many as fit into MAX_COLUMN_BYTES.

    >>> slot_count(65_536, 28), slot_count(65_537, 28)
    (28, 17)
    """
    return min(wanted, (MAX_COLUMN_BYTES - 1) // (_row_dtype(rows).itemsize + 1))


def direction(rows: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
    """(i*, sign) of each column: the row of the largest |h|, the lowest of several, and h's sign there.

    ``rows`` int64, ``history`` fp32, both (k, columns). An all-zero column has sign 0.
    """
    size = history.abs()
    largest = size.amax(dim=0)
    row = rows.masked_fill(size < largest, torch.iinfo(torch.int64).max).amin(dim=0)
    there = (rows == row) & (size == largest)
    return row, history.sign().mul_(there).sum(dim=0).sign_()


def enter(rows: Tensor, history: Tensor, row: Tensor, value: Tensor) -> None:
    """Let a newcomer take each column's weakest slot where it is stronger; ``rows`` and ``history`` are overwritten.

    ``row`` int64 (columns,), ``value`` fp32 (columns,). Of several weakest slots the first is taken.
    """
    weakest = history.abs().argmin(dim=0, keepdim=True)
    weak_value, weak_row = history.gather(0, weakest), rows.gather(0, weakest)
    stronger = value.abs().unsqueeze(0) > weak_value.abs()
    history.scatter_(0, weakest, torch.where(stronger, value.unsqueeze(0), weak_value))
    rows.scatter_(0, weakest, torch.where(stronger, row.unsqueeze(0), weak_row))


class TacoOneSparse(LeanOptimizer):
    """One entry a column moves by lr m/n, chosen from a history of at most 28 entries a column: 85 bytes a column.

    That is 0.02 bytes a parameter at 4,096 rows. It is meant for fine-tuning: few weights move at each step.

    Args:
        params: parameters, named parameters or groups. Contiguous float32, bfloat16 or float16. Two-dimensional ones
            are (out, in); a column is ``param[:, j]``. For other shapes see :func:`leantune.codec.tiles.stack_of`.
            Vectors keep fp32 momentum (4 bytes an element) and every element moves by lr against its sign. Matrices so
            short that fp32 momentum takes no more than the slots keep that, and move by the same rule.
        lr: what one entry moves in one step where m = n; there is no default that suits every model.
        beta: decay of the history, in [0, 1).
        weight_decay: decoupled: w is first multiplied by 1 - lr * weight_decay, all of it.
        slots: remembered entries a column, 1 to 28; columns of more than 65,536 rows keep at most 17 (86 bytes).
        rounding, seed: as in TernaryAdamW; the history's values are always rounded stochastically.

    Raises:
        InvalidArgumentError, InvalidTypeError: before anything is changed.

    >>> layer = torch.nn.Linear(256, 64)
    >>> before = layer.weight.detach().clone()
    >>> optimizer = TacoOneSparse(layer.named_parameters(), lr=1e-3)
    >>> layer(torch.ones(2, 256)).square().sum().backward(); _ = optimizer.step()
    >>> (layer.weight != before).sum(dim=0).unique().tolist(), optimizer.report().rows[0].state_bytes
    ([1], 21760)

    Source: the step is that of arXiv 2610.02199; the history is described in docs/taco_one_sparse.md.
    """

    structural = ("slots",)
    shardable = False
    tileable = False
    least_trial_rows = 64

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        beta: float = 0.9,
        weight_decay: float = 0.0,
        slots: int = MAX_SLOTS,
        rounding: str | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "beta": beta, "weight_decay": weight_decay, "slots": slots}
        super().__init__(params, defaults | {"rounding": rounding, "seed": seed})

    def _check_group(self, group: dict[str, Any]) -> None:
        check_common(group)
        beta, slots = group["beta"], group["slots"]
        if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < 1:
            raise InvalidArgumentError(f"beta is {beta!r}; it must be a number in [0, 1), for example 0.9.")
        if isinstance(slots, bool) or not isinstance(slots, int) or not 1 <= slots <= MAX_SLOTS:
            raise InvalidArgumentError(
                f"slots is {slots!r}; it must be an int from 1 to {MAX_SLOTS}: more would take over {MAX_COLUMN_BYTES} "
                "bytes a column."
            )

    def _layout(self, param: Tensor, group: dict[str, Any]) -> StateLayout:
        shape = tuple(param.shape)
        if len(shape) < 2:
            return StateLayout("exact fp32", "vector", {"momentum": (shape, torch.float32)})
        matrices, rows, columns = stack_of(shape)
        count = slot_count(rows, group["slots"])
        row_dtype = _row_dtype(rows)
        if rows * torch.float32.itemsize <= count * (row_dtype.itemsize + 1) + 1:
            reason = f"{rows} rows: momentum takes no more than slots"
            return StateLayout("exact fp32", reason, {"momentum": (shape, torch.float32)})
        total = matrices * columns
        reason = f"{count} slots a column" + (f", {matrices} matrices" if matrices > 1 else "")
        return StateLayout(
            "one-sparse",
            reason,
            {
                "slot_rows": ((count, total), row_dtype),
                "slot_values": ((count, total), torch.uint8),
                "slot_exponents": ((total,), torch.uint8),
            },
        )

    def _apply(
        self, shard: RowShard, grad: Tensor, group: dict[str, Any], state: dict[str, Any], grad_scale: float, key: int
    ) -> None:
        if len(shard.shape) < 2:
            _move_vector(WeightMatrix(shard, group["rounding"], None, key), grad, group, state["momentum"], grad_scale)
            return
        stack = stack_of(shard.shape)
        shape = (stack.matrices * stack.rows, stack.columns)
        weight = WeightMatrix(shard.viewed(shape), group["rounding"], None, key)
        grad = grad.reshape(shape)
        beta, lr = float(group["beta"]), float(group["lr"])
        decay, size = 1 - lr * float(group["weight_decay"]), lr * stack.rows / stack.columns
        momentum = state["momentum"].view(shape) if "momentum" in state else None
        for panel in _panels(stack):
            part = panel.tile.of(grad)
            if momentum is None:
                row, sign = _from_slots(part, state, panel, beta, grad_scale, key)
            else:
                row, sign = _from_momentum(part, panel.tile.of(momentum), beta, grad_scale)
            _move(weight, panel.tile, row, sign, size, decay)


class _Panel(NamedTuple):
    """Some columns of one matrix of the stack."""

    matrix: int
    tile: Tile
    """Where they are in the parameter, seen as (matrices x rows, columns)."""
    first: int
    """Their first column among the columns of all matrices."""


def _panels(stack: Stack) -> Iterator[_Panel]:
    for matrix in range(stack.matrices):
        top = matrix * stack.rows
        for left in range(0, stack.columns, PANEL_COLUMNS):
            right = min(left + PANEL_COLUMNS, stack.columns)
            yield _Panel(matrix, Tile(top, top + stack.rows, left, right), matrix * stack.columns + left)


def _from_slots(
    grad: Tensor, state: dict[str, Any], panel: _Panel, beta: float, grad_scale: float, key: int
) -> tuple[Tensor, Tensor]:
    """One step of the history of a panel's columns; (row within the matrix, sign) of each."""
    columns = slice(panel.first, panel.first + panel.tile.cols)
    stored_rows, stored_values = state["slot_rows"][:, columns], state["slot_values"][:, columns]
    exponents = state["slot_exponents"][columns]
    rows, history = _row_numbers(stored_rows), decode_columns(stored_values, exponents)
    occupied = history != 0
    history.mul_(beta).add_(_scaled(grad.gather(0, rows), grad_scale).mul_(1 - beta).mul_(occupied))
    newcomer = largest_outside(grad, rows, occupied)
    value = _scaled(grad.gather(0, newcomer.unsqueeze(0))[0], grad_scale).mul_(1 - beta)
    # Where every row is remembered, the newcomer is one of them and must not enter twice.
    value.masked_fill_(((rows == newcomer) & occupied).any(dim=0), 0)
    enter(rows, history, newcomer, value)
    found = direction(rows, history)
    count = rows.shape[0]
    first_block, blocks = panel.tile.left // _HASH_BLOCK, -(-panel.tile.cols // _HASH_BLOCK)
    bits = random_bits(splitmix64(key), panel.matrix * count, count, first_block, blocks, _HASH_BLOCK, grad.device)
    noise = high_half(bits.view(count, -1)[:, : panel.tile.cols])
    codes, new_exponents = encode_columns(history, noise)
    stored_rows.copy_(rows)
    stored_values.copy_(codes)
    exponents.copy_(new_exponents)
    return found


def largest_outside(grad: Tensor, rows: Tensor, occupied: Tensor) -> Tensor:
    """The row of each column's largest |gradient| outside its occupied slots, the lowest of several; int64 (columns,).

    ``grad`` (m, columns) of any floating dtype, at most PANEL_COLUMNS columns; ``rows`` int64 and ``occupied`` bool, of
    (slots, columns). Where all m rows are occupied the answer is one of them. One pass over the gradient in bands of
    rows finds the band that holds the largest; a second looks for its row in one band a column.
    """
    height, width = grad.shape
    band = max(1, TILE_ELEMENTS // max(1, width))
    column = torch.arange(width, device=grad.device)
    # Places of the slots, band after band: each band then finds its own as a slice.
    taken = (rows * width + column).masked_fill_(~occupied, height * width).view(-1).sort().values
    tops = range(0, height, band)
    edges = torch.tensor([*tops, height], device=grad.device).mul_(width)
    cuts = torch.searchsorted(taken, edges).tolist()
    sizes = torch.empty(min(band, height), width, dtype=grad.dtype, device=grad.device)
    most = torch.full((width,), -1.0, dtype=grad.dtype, device=grad.device)
    where = torch.zeros(width, dtype=torch.int64, device=grad.device)
    for number, top in enumerate(tops):
        part = sizes[: min(band, height - top)]
        torch.abs(grad[top : top + band], out=part)
        part.view(-1).index_fill_(0, taken[cuts[number] : cuts[number + 1]] - top * width, -1.0)
        largest = part.amax(dim=0)
        where.masked_fill_(largest > most, top)
        torch.maximum(most, largest, out=most)
    inside = where + torch.arange(band, device=grad.device).unsqueeze(1)
    exists = inside < height
    sizes = grad.gather(0, inside.clamp_(max=height - 1)).abs_()
    sizes.masked_fill_(~exists, -1.0)
    # A spare line takes the slots that lie in other bands.
    line = rows - where
    line.masked_fill_(~occupied | (line < 0) | (line >= band), band)
    sizes = torch.cat([sizes, sizes[:1]]).scatter_(0, line, -1.0)[:band]
    lines = torch.arange(band, device=grad.device).unsqueeze(1)
    return where + torch.where(sizes == most, lines, band - 1).amin(dim=0)


def _from_momentum(grad: Tensor, momentum: Tensor, beta: float, grad_scale: float) -> tuple[Tensor, Tensor]:
    """The same where every row of a (short) matrix is remembered in fp32."""
    momentum.mul_(beta).add_(_scaled(grad, grad_scale).mul_(1 - beta))
    rows = torch.arange(grad.shape[0], device=grad.device).unsqueeze(1).expand(grad.shape)
    return direction(rows, momentum)


def _move(weight: WeightMatrix, place: Tile, row: Tensor, sign: Tensor, size: float, decay: float) -> None:
    """w = w decay everywhere in ``place``, and w -= size sign at one row of each column, rounded once."""
    rows, columns = row + place.top, torch.arange(place.left, place.right, device=row.device)
    moved = weight.read_at(rows, columns)
    if decay != 1:
        band = max(1, TILE_ELEMENTS // max(1, place.cols))
        for top in range(place.top, place.bottom, band):
            tile = Tile(top, min(top + band, place.bottom), place.left, place.right)
            weight.write(tile, weight.read(tile).mul_(decay))
        moved.mul_(decay)
    weight.write_at(rows, columns, moved.sub_(sign, alpha=size))


def _move_vector(
    weight: WeightMatrix, grad: Tensor, group: dict[str, Any], momentum: Tensor, grad_scale: float
) -> None:
    """A vector's column has one row: every element moves by lr against the sign of its fp32 momentum."""
    momentum = momentum.view(grad.shape)
    beta, lr = float(group["beta"]), float(group["lr"])
    for tile in tiles(grad.shape[0], 1):
        history = tile.of(momentum).mul_(beta).add_(_scaled(tile.of(grad), grad_scale).mul_(1 - beta))
        values = weight.read(tile).mul_(1 - lr * float(group["weight_decay"]))
        weight.write(tile, values.sub_(history.sign(), alpha=lr))


def _scaled(grad: Tensor, grad_scale: float) -> Tensor:
    """fp32 copy of a gradient times ``grad_scale``."""
    copy = grad.to(torch.float32, copy=True)
    return copy if grad_scale == 1.0 else copy.mul_(grad_scale)


def _row_dtype(rows: int) -> torch.dtype:
    """The narrowest integer that names every row: int16 for up to 2^16, by its bits (torch cannot pickle uint16)."""
    return torch.int16 if rows <= _INT16_ROWS else torch.int32


def _row_numbers(stored: Tensor) -> Tensor:
    """int64 from what is stored."""
    rows = stored.to(torch.int64)
    return rows.bitwise_and_(0xFFFF) if stored.dtype is torch.int16 else rows
