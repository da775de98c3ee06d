"""Tiles: how a parameter of any size is walked through with bounded temporaries.

A parameter of two or more dimensions is seen as a matrix (:func:`stack_of`). A tile is a rectangle of
at most ``TILE_ELEMENTS`` elements (one row of one group of five blocks at least); its columns start on a group of five
blocks, so that its packed trits are whole bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from leantune.codec.trits import packed_bytes

TILE_ELEMENTS = 1 << 17
"""Elements of a tile: 512 KiB in fp32. A rule holds about a dozen temporaries of this size at once."""
LEAST_EXPERT_COLUMNS = 16


class Stack(NamedTuple):
    """A parameter as ``matrices`` matrices of (rows, columns), one below the other in memory."""

    matrices: int
    rows: int
    columns: int


def stack_of(shape: torch.Size | tuple[int, ...]) -> Stack:
    """How a parameter is seen.

    (m, n) is one matrix. (E, m, n) is E matrices (experts) where m > E and n >= 16; otherwise, like everything with
    more dimensions (convolutions), one matrix of (shape[0], the rest). A vector is one column, so that it is sharded by
    rows as a matrix is.

    >>> stack_of((5, 7)), stack_of((8, 64, 32)), stack_of((64, 32, 3)), stack_of((64, 32, 3, 3))[1:]
    (Stack(matrices=1, rows=5, columns=7), Stack(matrices=8, rows=64, columns=32), \
Stack(matrices=1, rows=64, columns=96), (64, 288))
    """
    if not shape:
        return Stack(1, 1, 1)
    if is_stack(shape):
        return Stack(int(shape[0]), int(shape[1]), int(shape[2]))
    columns = 1
    for size in shape[1:]:
        columns *= int(size)
    return Stack(1, int(shape[0]), columns)


def is_stack(shape: torch.Size | tuple[int, ...]) -> bool:
    """Whether the first dimension counts matrices."""
    return len(shape) == 3 and shape[1] > shape[0] and shape[2] >= LEAST_EXPERT_COLUMNS


def matrix_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """(rows, cols) under which a parameter's elements are walked: the matrices of its stack, one below the other.

    >>> matrix_shape((8, 3, 5)), matrix_shape((8, 64, 32)), matrix_shape((7,)), matrix_shape(())
    ((8, 15), (512, 32), (7, 1), (1, 1))
    """
    matrices, rows, columns = stack_of(shape)
    return matrices * rows, columns


def row_dimensions(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """The leading dimensions of a state tensor that has an entry, or a line of them, for each row: (rows,), or (E, m)
    for a stack, so that its first dimension is cut where the parameter's is."""
    return tuple(shape[:2]) if is_stack(shape) else matrix_shape(shape)[:1]


def rows_each(shape: torch.Size | tuple[int, ...]) -> int:
    """Rows of one place of the first dimension: those of a matrix of a stack, else 1."""
    return stack_of(shape).rows if is_stack(shape) else 1


@dataclass(frozen=True)
class Tile:
    """A rectangle of a matrix: rows [top, bottom), columns [left, right)."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def rows(self) -> int:
        return self.bottom - self.top

    @property
    def cols(self) -> int:
        return self.right - self.left

    def of(self, matrix: Tensor) -> Tensor:
        """The view of a (rows, cols) matrix that this tile covers."""
        return matrix[self.top : self.bottom, self.left : self.right]


def tiles(rows: int, cols: int, column_unit: int = 1, elements: int = TILE_ELEMENTS) -> Iterator[Tile]:
    """The tiles of a (rows, cols) matrix, row by row; column cuts fall on multiples of ``column_unit``.

    >>> [(t.top, t.bottom, t.left, t.right) for t in tiles(5, 4, elements=8)]
    [(0, 2, 0, 4), (2, 4, 0, 4), (4, 5, 0, 4)]
    """
    if rows == 0 or cols == 0:
        return
    width = cols if cols <= elements else max(column_unit, elements // column_unit * column_unit)
    height = max(1, elements // width)
    for top in range(0, rows, height):
        for left in range(0, cols, width):
            yield Tile(top, min(top + height, rows), left, min(left + width, cols))


class BlockGrid:
    """How ``cols`` columns fall into blocks of ``block_size`` neighbours of a row; the last may be short.

    ``counts``: elements of each block, fp32 (blocks,).
    """

    def __init__(self, cols: int, block_size: int, device: torch.device) -> None:
        self.cols = cols
        self.block_size = block_size
        self.blocks = -(-cols // block_size)
        self.bytes_per_row = packed_bytes(cols, block_size)
        self.counts = torch.full((self.blocks,), float(block_size), dtype=torch.float32, device=device)
        if cols % block_size:
            self.counts[-1] = cols % block_size

    def split(self, matrix: Tensor) -> Tensor:
        """(rows, cols) into (rows, blocks, block_size), the missing tail filled with zeros. A view where no tail is
        missing."""
        missing = self.blocks * self.block_size - self.cols
        if missing:
            matrix = torch.nn.functional.pad(matrix, (0, missing))
        return matrix.reshape(matrix.shape[0], self.blocks, self.block_size)

    def join(self, blocks: Tensor) -> Tensor:
        """(rows, blocks, block_size) back into (rows, cols)."""
        return blocks.reshape(blocks.shape[0], -1)[:, : self.cols]
