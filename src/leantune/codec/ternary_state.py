"""The ternary state of one parameter: which tensors hold momentum and second moment, and how a tile of them is read and
written.

Storage only: it knows blocks, trits and the carry, and no optimizer. Momentum u decodes to C + s q (+ s2 q2), with C =
U V^T the low-rank carry; the second moment decodes to f L^-1(l + d x), with f its column factors.

Whatever is written replaces what was there; a tile is read before it is written.
"""

import functools

import torch
from torch import Tensor

from leantune.codec import log_ternary, ternary
from leantune.codec.column_factors import ColumnFactors
from leantune.codec.tiles import BlockGrid, Tile, is_stack, matrix_shape, row_dimensions
from leantune.codec.trits import TRITS_PER_BYTE, pack_trits, packed_bytes, unpack_trits

Spec = tuple[tuple[int, ...], torch.dtype]

REPLICATED = frozenset({"carry_columns", "carry_basis", "variance_columns"})
"""Tensors that belong to the columns: whole on every process where the rows are sharded."""


def tensor_specs(shape: tuple[int, ...], block_size: int, planes: int, rank: int) -> dict[str, Spec]:
    """Shape and dtype of every tensor of a parameter's state, by name. They begin with the dimensions of its rows,
    except in `REPLICATED`."""
    lead, cols = row_dimensions(shape), matrix_shape(shape)[1]
    trits: Spec = ((*lead, packed_bytes(cols, block_size)), torch.uint8)
    scalars: Spec = ((*lead, -(-cols // block_size)), torch.bfloat16)
    specs = {"momentum_trits": trits, "momentum_scale": scalars}
    if planes == 2:
        specs |= {"momentum_trits_2": trits, "momentum_scale_2": scalars}
    specs |= {"variance_trits": trits, "variance_level": scalars, "variance_step": scalars}
    specs["variance_columns"] = ((cols,), torch.float32)
    if rank:
        across: Spec = ((cols, rank), torch.bfloat16)
        specs |= {"carry_rows": ((*lead, rank), torch.bfloat16), "carry_columns": across, "carry_basis": across}
    return specs


def by_rows(tensors: dict[str, Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Views of the state tensors of a parameter of this ``shape`` in which the rows are one dimension."""
    if not is_stack(shape):
        return tensors
    return {
        name: value if name in REPLICATED or value.dim() < 2 else value.flatten(0, 1) for name, value in tensors.items()
    }


class TernaryState:
    """A view of one parameter's state tensors that reads and writes tiles of them as fp32 blocks (rows, blocks,
    block_size)."""

    def __init__(self, tensors: dict[str, Tensor], block_size: int) -> None:
        self._tensors = tensors
        self._block_size = block_size
        self._plane_suffixes = ("", "_2") if "momentum_trits_2" in tensors else ("",)
        self.has_carry = "carry_rows" in tensors

    @property
    def column_means(self) -> Tensor:
        """c, the running means of g^2 over the rows, fp32 (cols,)."""
        return self._tensors["variance_columns"]

    @property
    def basis(self) -> Tensor:
        """V that the next step projects u onto, bfloat16 (cols, rank)."""
        return self._tensors["carry_basis"]

    def momentum(self, tile: Tile, grid: BlockGrid) -> Tensor:
        """The stored momentum u of this tile, fp32 blocks."""
        parts = [
            ternary.dequantise(
                self._trits(f"momentum_trits{suffix}", tile, grid), self._scalars(f"momentum_scale{suffix}", tile)
            )
            for suffix in self._plane_suffixes
        ]
        if self.has_carry:
            rows, columns = self._tensors["carry_rows"][tile.top : tile.bottom], self._tensors["carry_columns"]
            parts.append(_carried(rows, columns, grid))
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def variance(self, tile: Tile, grid: BlockGrid) -> tuple[Tensor, Tensor]:
        """(v, x): the stored second moment of this tile, and its trits, fp32 blocks."""
        trits = self._trits("variance_trits", tile, grid)
        ratios = log_ternary.decode(trits, self._scalars("variance_level", tile), self._scalars("variance_step", tile))
        return ratios.mul_(_columns(tile, grid, self._factors.times)), trits

    @functools.cached_property
    def _factors(self) -> ColumnFactors:
        return ColumnFactors(self.column_means)

    def write_momentum(
        self, tile: Tile, grid: BlockGrid, momentum: Tensor, carry: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Encode u; returns u as it will decode, computed from the stored values.

        ``carry``: (U of the tile's rows, V) in bfloat16, what u is coded against; U is stored here, V with
        :meth:`write_columns`.
        """
        decoded = None
        if carry is not None:
            self._tensors["carry_rows"][tile.top : tile.bottom] = carry[0]
            decoded = _carried(*carry, grid)
        for suffix in self._plane_suffixes:
            residual = momentum if decoded is None else momentum - decoded
            trits, scale = ternary.quantise(residual, grid.counts)
            self._write_trits(f"momentum_trits{suffix}", tile, grid, trits)
            self._scalars(f"momentum_scale{suffix}", tile).copy_(scale)
            part = ternary.dequantise(trits, scale)
            decoded = part if decoded is None else decoded.add_(part)
        return momentum if decoded is None else decoded

    def write_variance(
        self,
        tile: Tile,
        grid: BlockGrid,
        values: Tensor,
        previous_trits: Tensor,
        uniform: Tensor,
        factors: ColumnFactors,
        only_empty: bool = False,
    ) -> None:
        """Encode v relative to ``factors``, with stochastic rounding of its trits (``uniform``: fp32 in [0, 1)).

        ``only_empty``: blocks that hold something stay as they are.
        """
        level, step = self._scalars("variance_level", tile), self._scalars("variance_step", tile)
        stays = level != 0
        if only_empty and bool(stays.all()):
            return
        ratios, live = values * _columns(tile, grid, factors.over), _columns(tile, grid, factors.live)[0]
        trits, new_level, new_step = log_ternary.encode(ratios, live, previous_trits, step, uniform)
        if only_empty:
            trits = torch.where(stays.unsqueeze(2), previous_trits, trits)
            new_level, new_step = torch.where(stays, level, new_level), torch.where(stays, step, new_step)
        self._write_trits("variance_trits", tile, grid, trits)
        level.copy_(new_level)
        step.copy_(new_step)

    def write_columns(self, means: Tensor, carry: tuple[Tensor, Tensor] | None) -> None:
        """Store what belongs to the columns, once all rows are coded: c that v was coded relative to, and (V that u was
        coded against, V for the next step)."""
        self._tensors["variance_columns"].copy_(means)
        if carry is not None:
            self._tensors["carry_columns"].copy_(carry[0])
            self._tensors["carry_basis"].copy_(carry[1])

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


def _columns(tile: Tile, grid: BlockGrid, vector: Tensor) -> Tensor:
    """The part of a (cols,) vector under this tile, as blocks (1, blocks, size), 0 where no column is."""
    return grid.split(vector[tile.left : tile.right].unsqueeze(0))


def _carried(rows: Tensor, columns: Tensor, grid: BlockGrid) -> Tensor:
    """C of whole rows, fp32 blocks, from U of these rows (rows, rank) and V (cols, rank)."""
    return grid.split(rows.float() @ columns.float().t())
