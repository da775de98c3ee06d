"""Reading a tile of a weight as fp32 and writing the result back in the weight's own format."""

import torch
from torch import Tensor

from leantune.codec.counter_hash import bits_at, high_half, random_bits
from leantune.codec.rounding import join_24, round_stochastic_, split_24
from leantune.codec.tiles import Tile, matrix_shape, row_dimensions
from leantune.kernels import native
from leantune.optim.row_shard import RowShard


class WeightMatrix:
    """The rows of a parameter that this process holds, with the rounding its group asks for.

    ``remainder``: the int8 (rows, cols) of ``master_bits=24``, else None.
    ``rounding``: "nearest", or "stochastic", which None means below 32 bits.
    """

    def __init__(self, shard: RowShard, rounding: str | None, remainder: Tensor | None, key: int) -> None:
        self.matrix = shard.matrix
        self.first_row = shard.first_row
        self._remainder = remainder
        self._key = key
        self.block_size = bits_block(self.matrix.shape[1])
        self.stochastic = rounds_stochastically(self.matrix, rounding)

    def read(self, tile: Tile) -> Tensor:
        """fp32 (rows, cols) copy of the tile."""
        part = tile.of(self.matrix)
        if self._remainder is not None:
            return join_24(part, tile.of(self._remainder))
        return part.to(torch.float32, copy=True)

    def write(self, tile: Tile, values: Tensor, bits: Tensor | None = None) -> None:
        """Store fp32 ``values`` (overwritten). ``bits``: int32 random bits of the tile, drawn here where None."""
        if self.stochastic and bits is None and native.stores(self.matrix, values):
            place = tile.top, tile.left
            native.store(self.matrix, self._remainder, values, place, self._key, self.first_row, self.block_size)
            return
        part = tile.of(self.matrix)
        noise = self._noise(tile, bits) if self.stochastic else None
        if self._remainder is not None:
            weight, remainder = split_24(values, noise)
            part.copy_(weight)
            tile.of(self._remainder).copy_(remainder)
        elif noise is not None:
            part.copy_(round_stochastic_(values, part.dtype, noise))
        else:
            part.copy_(values)

    def read_at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """fp32 copy of single elements; ``rows`` and ``columns`` int64, of one shape. Without a remainder only."""
        return self.matrix[rows, columns].float()

    def write_at(self, rows: Tensor, columns: Tensor, values: Tensor) -> None:
        """Store fp32 ``values`` (overwritten) at single elements, rounded as :meth:`write` would round them there."""
        if self.stochastic:
            noise = high_half(bits_at(self._key, self.first_row + rows, columns, self.block_size))
            round_stochastic_(values, self.matrix.dtype, noise)
        self.matrix[rows, columns] = values.to(self.matrix.dtype)

    def _noise(self, tile: Tile, bits: Tensor | None) -> Tensor:
        if bits is None:
            first, blocks = tile.left // self.block_size, -(-tile.cols // self.block_size)
            top = self.first_row + tile.top
            drawn = random_bits(self._key, top, tile.rows, first, blocks, self.block_size, self.matrix.device)
            bits = drawn.view(tile.rows, -1)[:, : tile.cols]
        return high_half(bits)


def bits_block(cols: int) -> int:
    """Elements of a row that share a key of random bits, where no state's blocks say it."""
    return min(128, cols)


def rounds_stochastically(weight: Tensor, rounding: str | None) -> bool:
    """Whether weights of this dtype are rounded stochastically: a group's None means below 32 bits."""
    return weight.dtype is not torch.float32 and rounding != "nearest"


def master_spec(
    shape: tuple[int, ...], dtype: torch.dtype, master_bits: int | None
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The state tensor that ``master_bits=24`` adds to a bfloat16 weight: int8 of its rows, 1 byte a parameter."""
    if master_bits == 24 and dtype is torch.bfloat16:
        return {"weight_remainder": ((*row_dimensions(shape), matrix_shape(shape)[1]), torch.int8)}
    return {}
