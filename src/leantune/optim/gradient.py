"""Reading a gradient a part at a time: the tiles in which rules walk it, and its norm, with bounded temporaries.

A gradient is a tensor, or a `TiledGradient`, which never exists whole. Rules and norms see the same parts of both, so
that they give the same bits for both.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from leantune.codec.tiles import Tile, tiles
from leantune.errors import InvalidArgumentError
from leantune.kernels import native
from leantune.optim.row_shard import is_sharded, local, row_shard

NORM_CHUNK = 1 << 20
"""Elements whose squares are summed together, in fp32."""

Walk = Callable[[], Iterable[tuple[int, Tensor]]]
"""Makes a gradient: each call gives (index of the first row, rows (n, cols), contiguous) from the first row to the
last. The memory of the rows may be reused for the next ones."""


class TiledGradient:
    """The gradient of a matrix that exists a few rows at a time and is made again by every walk.

    Args:
        shape: (rows, cols) of the parameter.
        dtype, device: of the rows that a walk gives.
        walk: makes it (see `Walk`), the same values each time.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, walk: Walk) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._walk = walk

    def walk(self) -> Iterator[tuple[int, Tensor]]:
        """One walk. Raises InvalidArgumentError where its rows do not follow one another or are not all there."""
        end = 0
        for first, rows in self._walk():
            if first != end or rows.shape[1:] != self.shape[1:]:
                raise InvalidArgumentError(
                    f"a gradient of shape {self.shape} goes on with rows {tuple(rows.shape)} from row {first} after "
                    f"row {end}: the tiles must follow one another, each with whole rows."
                )
            yield first, rows
            end = first + rows.shape[0]
        if end != self.shape[0]:
            raise InvalidArgumentError(f"a gradient of shape {self.shape} ended after {end} rows.")

    def tiles(self, column_unit: int) -> Iterator[tuple[Tile, Tensor]]:
        """One walk in the tiles of leantune.codec.tiles, each with its part of the gradient."""
        strips: Iterator[Tensor] | None = None
        for tile in tiles(*self.shape, column_unit=column_unit):
            if strips is None:
                strips = self.pieces(tile.rows * self.shape[1])
            if tile.left == 0:
                strip = next(strips).view(tile.rows, -1)
            yield tile, strip[:, tile.left : tile.right]
        if strips is not None:
            # To the walk's end: whoever makes the gradient may have something left to do there.
            next(strips, None)

    def pieces(self, size: int) -> Iterator[Tensor]:
        """One walk in flat pieces of ``size`` elements, the last one shorter. What lies across two tiles is copied,
        into memory for one piece."""
        size = max(1, min(size, self.shape[0] * self.shape[1]))
        copy, held = None, 0
        for _, rows in self.walk():
            flat = rows.view(-1)
            if copy is not None and held:
                more = flat[: size - held]
                copy[held : held + more.numel()] = more
                held, flat = held + more.numel(), flat[more.numel() :]
                if held == size:
                    yield copy
                    held = 0
            whole = flat.numel() // size * size
            for start in range(0, whole, size):
                yield flat[start : start + size]
            if whole < flat.numel():
                copy = flat.new_empty(size) if copy is None else copy
                held = flat.numel() - whole
                copy[:held] = flat[whole:]
        if copy is not None and held:
            yield copy[:held]


Gradient = Tensor | TiledGradient


def gradient_tiles(grad: Gradient, column_unit: int) -> Iterator[tuple[Tile, Tensor]]:
    """The tiles of a (rows, cols) gradient in the order of leantune.codec.tiles, each with its part of it."""
    if isinstance(grad, TiledGradient):
        yield from grad.tiles(column_unit)
        return
    for tile in tiles(grad.shape[0], grad.shape[1], column_unit=column_unit):
        yield tile, tile.of(grad)


def gradient_rows(grad: Gradient) -> Iterator[tuple[int, Tensor]]:
    """(first row, rows) of a (rows, cols) gradient in the parts it is made in: a tensor is one."""
    return iter([(0, grad)]) if isinstance(grad, Tensor) else grad.walk()


def squared_norm(grad: Gradient) -> Tensor:
    """Sum of squares in fp32, a tensor of no dimensions; NaN or Inf where an element is (4 MiB of temporaries at most).

    The chunks are added in order, so equal gradients give equal bits wherever the norm is taken. Two exceptions on the
    CPU, of 1e-7 of the norm: the kernel adds all chunks of a whole gradient in fp64, while those of a tiled one of more
    than 2^20 elements are rounded to fp32 before; and it takes the fp32 tiles of a float16 gradient, not a whole one.
    """
    if isinstance(grad, TiledGradient):
        parts = [squared_norm(piece) for piece in grad.pieces(NORM_CHUNK)]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
    in_kernel = native.squared_norm(grad)
    if in_kernel is not None:
        return torch.tensor(in_kernel, dtype=torch.float32, device="cpu")
    return _in_torch(grad)


def _in_torch(grad: Tensor) -> Tensor:
    if grad.numel() <= NORM_CHUNK:
        return _chunk_norm(grad)
    if not grad.is_contiguous():
        rows = max(1, NORM_CHUNK // (grad.numel() // grad.shape[0]))
        parts = [squared_norm(grad[top : top + rows].contiguous()) for top in range(0, grad.shape[0], rows)]
    else:
        parts = [_chunk_norm(chunk) for chunk in grad.view(-1).split(NORM_CHUNK)]
    return torch.stack(parts).sum()


def whole_squared_norm(param: Tensor, grad: Gradient) -> float:
    """:func:`squared_norm` of a parameter's whole gradient, wherever its rows lie: the same on every process."""
    if isinstance(grad, TiledGradient):
        return float(squared_norm(grad).item())
    if is_sharded(param):
        return float(row_shard(param).total(squared_norm(local(grad))).item())
    in_kernel = native.squared_norm(grad)
    return float(_in_torch(grad).item()) if in_kernel is None else in_kernel


def _chunk_norm(chunk: Tensor) -> Tensor:
    if chunk.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=chunk.device)
    return torch.linalg.vector_norm(chunk.float()).square()
