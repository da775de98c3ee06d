"""The ternary state of one parameter: which tensors hold momentum and second moment, and how a tile of them is read and
written.

Storage only: it knows blocks, trits and the carry, and no optimizer. Momentum u decodes to C + s q (+ s2 q2), with C =
U V^T the low-rank carry; the second moment decodes to f L^-1(l + d x), with f its row and column factors.
"""

import functools

import torch
from torch import Tensor

from leantune.codec import log_ternary, ternary
from leantune.codec.factored import Factors, product, ratio
from leantune.codec.tiles import BlockGrid, Tile
from leantune.codec.trits import TRITS_PER_BYTE, pack_trits, packed_bytes, unpack_trits

Spec = tuple[tuple[int, ...], torch.dtype]

REPLICATED = frozenset({"carry_columns", "variance_columns"})
"""Tensors that belong to the columns: whole on every process where the rows are sharded."""


def tensor_specs(rows: int, cols: int, block_size: int, planes: int, rank: int) -> dict[str, Spec]:
    """Shape and dtype of every tensor of the state, by name. The first dimension is the parameter's rows, except in
    `REPLICATED`."""
    blocks = -(-cols // block_size)
    trits: Spec = ((rows, packed_bytes(cols, block_size)), torch.uint8)
    scalars: Spec = ((rows, blocks), torch.bfloat16)
    specs = {"momentum_trits": trits, "momentum_scale": scalars}
    if planes == 2:
        specs |= {"momentum_trits_2": trits, "momentum_scale_2": scalars}
    specs |= {"variance_trits": trits, "variance_level": scalars, "variance_step": scalars}
    specs |= {"variance_rows": ((rows,), torch.float32), "variance_columns": ((cols,), torch.float32)}
    if rank:
        specs |= {"carry_rows": ((rows, rank), torch.bfloat16), "carry_columns": ((cols, rank), torch.bfloat16)}
    return specs


class TernaryState:
    """A view of one parameter's state tensors that reads and writes tiles of them as fp32 blocks (rows, blocks,
    block_size)."""

    def __init__(self, tensors: dict[str, Tensor], block_size: int) -> None:
        self._tensors = tensors
        self._block_size = block_size
        self._plane_suffixes = ("", "_2") if "momentum_trits_2" in tensors else ("",)
        self.has_carry = "carry_rows" in tensors

    @functools.cached_property
    def carry(self) -> tuple[Tensor, Tensor]:
        """(U, V) of the stored carry in fp32, as they were when first asked for."""
        return self._tensors["carry_rows"].float(), self.basis

    @property
    def basis(self) -> Tensor:
        """V of the carry, fp32 (cols, rank): where the next power iteration starts."""
        return self._tensors["carry_columns"].float()

    def momentum(self, tile: Tile, grid: BlockGrid) -> Tensor:
        """The stored momentum u of this tile."""
        total = _carried(tile, grid, self.carry) if self.has_carry else None
        for suffix in self._plane_suffixes:
            trits = self._trits(f"momentum_trits{suffix}", tile, grid)
            part = ternary.dequantise(trits, self._scalars(f"momentum_scale{suffix}", tile))
            total = part if total is None else total.add_(part)
        return torch.zeros(()) if total is None else total

    def variance(self, tile: Tile, grid: BlockGrid) -> tuple[Tensor, Tensor]:
        """(v, x): the stored second moment of this tile, and its trits."""
        trits = self._trits("variance_trits", tile, grid)
        ratios = log_ternary.decode(trits, self._scalars("variance_level", tile), self._scalars("variance_step", tile))
        return product(ratios, _factors(tile, grid, self.factors)), trits

    @functools.cached_property
    def factors(self) -> Factors:
        """The row and column factors as they were when first asked for."""
        return Factors(self._tensors["variance_rows"].clone(), self._tensors["variance_columns"].clone())

    def average_factors(self, row_means: Tensor, column_means: Tensor, beta2: float) -> Factors:
        """r = beta2 r + (1 - beta2) mean over columns of g^2, c likewise; stored, and what the next encode divides by.

        What is stored already goes on decoding with :attr:`factors`, those before.
        """
        _ = self.factors
        rows, columns = self._tensors["variance_rows"], self._tensors["variance_columns"]
        rows.lerp_(row_means, 1 - beta2)
        columns.lerp_(column_means, 1 - beta2)
        return Factors(rows, columns)

    def write_momentum(
        self, tile: Tile, grid: BlockGrid, momentum: Tensor, carry: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Encode u against the new ``carry``; returns u as it will decode, computed from the stored values."""
        decoded = None if carry is None else _carried(tile, grid, carry)
        for suffix in self._plane_suffixes:
            residual = momentum if decoded is None else momentum - decoded
            trits, scale = ternary.quantise(residual, grid.counts)
            self._write_trits(f"momentum_trits{suffix}", tile, grid, trits)
            self._scalars(f"momentum_scale{suffix}", tile).copy_(scale)
            part = ternary.dequantise(trits, scale)
            decoded = part if decoded is None else decoded.add_(part)
        return momentum if decoded is None else decoded

    def write_variance(
        self, tile: Tile, grid: BlockGrid, values: Tensor, previous_trits: Tensor, uniform: Tensor, factors: Factors
    ) -> None:
        """Encode v relative to ``factors``, with stochastic rounding of its trits (``uniform``: fp32 in [0, 1))."""
        step = self._scalars("variance_step", tile)
        ratios = ratio(values, _factors(tile, grid, factors))
        trits, level, new_step = log_ternary.encode(ratios, grid.counts, grid.mask, previous_trits, step, uniform)
        self._write_trits("variance_trits", tile, grid, trits)
        self._scalars("variance_level", tile).copy_(level)
        step.copy_(new_step)

    def write_carry(self, carry: tuple[Tensor, Tensor]) -> None:
        """Store the carry that the last :meth:`write_momentum` calls coded against."""
        self._tensors["carry_rows"].copy_(carry[0])
        self._tensors["carry_columns"].copy_(carry[1])

    def _scalars(self, name: str, tile: Tile) -> Tensor:
        left = tile.left // self._block_size
        return self._tensors[name][tile.top : tile.bottom, left : left + -(-tile.cols // self._block_size)]

    def _bytes(self, name: str, tile: Tile, grid: BlockGrid) -> Tensor:
        left = tile.left // TRITS_PER_BYTE
        return self._tensors[name][tile.top : tile.bottom, left : left + grid.bytes_per_row]

    def _trits(self, name: str, tile: Tile, grid: BlockGrid) -> Tensor:
        return grid.split(unpack_trits(self._bytes(name, tile, grid), grid.cols, self._block_size))

    def _write_trits(self, name: str, tile: Tile, grid: BlockGrid, trits: Tensor) -> None:
        self._bytes(name, tile, grid).copy_(pack_trits(grid.join(trits), self._block_size))


def _factors(tile: Tile, grid: BlockGrid, factors: Factors) -> Tensor:
    """f of this tile, fp32 blocks; 1 where no element is (a zero would have no logarithm)."""
    missing = grid.blocks * grid.block_size - grid.cols
    part = factors.of(tile.top, tile.bottom, tile.left, tile.right)
    padded = torch.nn.functional.pad(part, (0, missing), value=1.0) if missing else part
    return padded.reshape(part.shape[0], grid.blocks, grid.block_size)


def _carried(tile: Tile, grid: BlockGrid, carry: tuple[Tensor, Tensor]) -> Tensor:
    """C of this tile, fp32 blocks, from fp32 factors (rows, rank) and (cols, rank)."""
    rows, columns = carry
    return grid.split(rows[tile.top : tile.bottom] @ columns[tile.left : tile.right].t())
