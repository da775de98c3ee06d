"""Logits of an output layer, one (tokens x vocabulary) tile at a time, within a number of bytes.

The loss walks the same tiles twice: forward to sum exponentials, backward to make gradients. What a tile is made of
(widened weight rows, widened hidden states, the logits and their working copy) is planned from bytes (`.tile_plan`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from leantune.activations.tile_plan import TileCost, plan_tiles


class LogitTiles:
    """Tiles of scale * (hidden @ weight^T + bias), in the wide dtype (fp32; float64 for float64 hidden states).

    Operands are rounded to ``operand_dtype`` (what ``F.linear`` would multiply). On CUDA 16-bit operands go to the
    matrix unit as they are, with fp32 results. Elsewhere they are widened a tile at a time: a CPU without 16-bit
    matrix instructions is up to a hundred times slower in 16 bits, and a widened product is never rounded in between.

    Args:
        hidden: (rows, H). Not changed.
        index: int64 (tokens,), the rows that count; None for all of them.
        weight: (V, H). Not changed.
        bias: (V,) or None.
        scale: factor on every logit.
        operand_dtype: the dtype products are made of.
        tile_bytes: bound on the bytes of a tile with all its copies.
        copies: working copies of a logit besides the logit itself, in the wide dtype.
        gradient_room: a tile also needs wide room for its rows of the weight's gradient.
    """

    def __init__(
        self,
        hidden: Tensor,
        index: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        *,
        scale: float,
        operand_dtype: torch.dtype,
        tile_bytes: int,
        copies: int = 0,
        gradient_room: bool = False,
        backward: bool = False,
    ) -> None:
        self.hidden, self.index, self.weight, self.bias = hidden, index, weight, bias
        self.scale = scale
        self.wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.native = multiplies_natively(weight.device, operand_dtype)
        self.operand_dtype = operand_dtype
        self.product_dtype = operand_dtype if self.native else self.wide
        self.tokens = hidden.shape[0] if index is None else index.shape[0]
        self.vocabulary = weight.shape[0]
        cost = self._cost(copies, gradient_room, backward)
        rows, width = plan_tiles(max(1, self.tokens), self.vocabulary, cost, tile_bytes)
        self.token_slices = _slices(self.tokens, rows)
        self.vocabulary_slices = _slices(self.vocabulary, width)
        self._logit_room = None if self.native else hidden.new_empty(rows * width, dtype=self.wide)
        self._only_rows: Tensor | None = None
        self._row_room: Tensor | None = None
        if index is not None or _casts(hidden.dtype, operand_dtype, self.product_dtype):
            self._row_room = hidden.new_empty((min(rows, self.tokens), hidden.shape[1]), dtype=self.product_dtype)
        self._weight_room: Tensor | None = None
        if _casts(weight.dtype, operand_dtype, self.product_dtype):
            self._weight_room = weight.new_empty((width, weight.shape[1]), dtype=self.product_dtype)

    def _cost(self, copies: int, gradient_room: bool, backward: bool) -> TileCost:
        wide, size = self.wide.itemsize, self.weight.shape[1]
        cell, column, row = wide * (1 + copies), 0, 0
        for dtype in _casts(self.weight.dtype, self.operand_dtype, self.product_dtype):
            column += size * dtype.itemsize
        if gradient_room:
            column += size * wide
        if self.index is not None:
            row += size * self.hidden.dtype.itemsize
        for dtype in _casts(self.hidden.dtype, self.operand_dtype, self.product_dtype):
            row += size * dtype.itemsize
        if self.native and backward:
            # The logits' gradient in 16 bits, and products that cannot be added in place.
            cell += self.product_dtype.itemsize
            row += size * wide
            column += size * wide
        return TileCost(cell, column, row)

    def vocabulary_tiles(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """(vocabulary slice, its rows of the weight (t, H), its bias (t,)), ready to be multiplied."""
        for entries in self.vocabulary_slices:
            bias = None if self.bias is None else self.bias[entries].to(self.operand_dtype).to(self.wide)
            yield entries, self._widened(self.weight[entries]), bias

    def _widened(self, weight: Tensor) -> Tensor:
        """Rows of the weight, ready to be multiplied; the memory is reused by the next tile, or two would be alive."""
        if self._weight_room is None:
            return weight
        rounded = weight if self.operand_dtype == self.product_dtype else weight.to(self.operand_dtype)
        return self._weight_room[: weight.shape[0]].copy_(rounded)

    def token_tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """(token slice, its hidden states (n, H)), ready to be multiplied; made once where one tile holds all.

        Where there are several, the memory is reused by the next one.
        """
        for tokens in self.token_slices:
            rows = self._only_rows
            if rows is None:
                rows = self._ready(tokens)
                if len(self.token_slices) == 1:
                    self._only_rows = rows
            yield tokens, rows

    def _ready(self, tokens: slice) -> Tensor:
        room = None if self._row_room is None else self._row_room[: tokens.stop - tokens.start]
        casts = _casts(self.hidden.dtype, self.operand_dtype, self.product_dtype)
        if self.index is None:
            rows = self.hidden[tokens]
        elif room is not None and not casts:
            return torch.index_select(self.hidden, 0, self.index[tokens], out=room)
        else:
            rows = self.hidden.index_select(0, self.index[tokens])
        return rows if room is None else room.copy_(rows.to(self.operand_dtype))

    def logits(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(n, t) wide logits, scaled, not capped. The memory is reused by the next call: change it freely."""
        if self._logit_room is None:
            logits = torch.mm(rows, weight.t(), out_dtype=self.wide)
        else:
            shape = rows.shape[0], weight.shape[0]
            logits = torch.mm(rows, weight.t(), out=self._logit_room[: shape[0] * shape[1]].view(shape))
        if bias is not None:
            logits += bias
        return logits if self.scale == 1.0 else logits.mul_(self.scale)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor, *, fresh: bool = False) -> None:
        """total += left @ right (= where ``fresh``), summed in the wide dtype of ``total``."""
        if self.native:
            product = torch.mm(left, right, out_dtype=self.wide)
            if fresh:
                total.copy_(product)
            else:
                total += product
        elif fresh:
            torch.mm(left, right, out=total)
        else:
            total.addmm_(left, right)


def multiplies_natively(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``torch.mm`` takes operands of this dtype and gives fp32: 16 bits on an NVIDIA GPU."""
    return device.type == "cuda" and torch.version.cuda is not None and dtype in (torch.bfloat16, torch.float16)


def _casts(start: torch.dtype, *steps: torch.dtype) -> list[torch.dtype]:
    """The dtypes among ``steps`` that a tensor of ``start`` is copied into, one after the other."""
    made = []
    for step in steps:
        if step != start:
            made.append(step)
        start = step
    return made


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]
