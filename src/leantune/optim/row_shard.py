"""The rows of a parameter that this process holds: all of them, or a range of a DTensor sharded over its first
dimension."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leantune.codec.tiles import matrix_shape, rows_each
from leantune.errors import InvalidTypeError


@dataclass(frozen=True)
class RowShard:
    """``matrix``: the (rows, cols) of this process, a view of the parameter's memory. ``first_row``: index of its first
    row in the whole parameter, ``all_rows``: rows of the whole, ``shape``: the whole parameter's. ``groups``: process
    groups over which the rest lies."""

    matrix: Tensor
    first_row: int
    all_rows: int
    shape: tuple[int, ...]
    groups: Sequence[Any] = ()

    @property
    def held(self) -> int:
        """How much of the parameter's first dimension is here; a range of it from :attr:`first` on."""
        return self.matrix.shape[0] // rows_each(self.shape)

    @property
    def first(self) -> int:
        """Where that range begins."""
        return self.first_row // rows_each(self.shape)

    def viewed(self, shape: tuple[int, int]) -> "RowShard":
        """The same memory as another matrix; for a parameter that is wholly here."""
        return RowShard(self.matrix.view(shape), 0, shape[0], self.shape)

    def total(self, part: Tensor) -> Tensor:
        """The sum of ``part`` over the processes that hold the other rows, the same bits on each; ``part`` itself where
        there are none."""
        part = part.contiguous() if self.groups else part
        for group in self.groups:
            torch.distributed.all_reduce(part, group=group)
        return part


def row_shard(param: Any) -> RowShard:
    """How this process holds a parameter: a tensor, or a DTensor whose shards are whole rows.

    Raises InvalidTypeError for a DTensor cut along another dimension, or not summed yet.
    """
    if not is_sharded(param):
        matrix = param.detach().view(matrix_shape(param.shape))
        return RowShard(matrix, 0, matrix.shape[0], tuple(param.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, groups = param.device_mesh, []
    for dimension, placement in enumerate(param.placements):
        if getattr(placement, "dim", None) == 0:
            groups.append(mesh.get_group(dimension))
        elif not placement.is_replicate():
            raise InvalidTypeError(
                f"a parameter of shape {tuple(param.shape)} is placed as {tuple(param.placements)}: its state can be "
                "cut by whole rows alone (Shard(0), also strided, and Replicate). Shard it over dimension 0, as "
                "fully_shard does."
            )
    _, offset = compute_local_shape_and_global_offset(param.shape, mesh, param.placements)
    rows, cols = matrix_shape(param.shape)
    part = local(param).detach()
    matrix = part.view(part.numel() // max(cols, 1), cols)
    first_row = offset[0] * rows_each(param.shape) if offset else 0
    return RowShard(matrix, first_row, rows, tuple(param.shape), groups)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor (asked without importing torch.distributed.tensor)."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Any) -> Tensor:
    """The part of a DTensor that this process holds, sharing its memory; a tensor itself."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def whole_tensor(tensor: Any) -> Tensor:
    """All of a DTensor, gathered (every process must call this); a tensor itself."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def placed_like(param: Any, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``rows``, this process's part of a state tensor of ``shape`` (global) with the parameter's rows, as the parameter
    is placed."""
    if not is_sharded(param):
        return rows
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        rows, param.device_mesh, param.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def rows_of(value: Any, param: Any, shard: RowShard) -> Tensor:
    """This process's rows of a saved state tensor: of a whole one, or of a DTensor, wherever it lies."""
    if not is_sharded(value):
        part: Tensor = value[shard.first : shard.first + shard.held]
        return part
    if value.device_mesh != param.device_mesh or value.placements != param.placements:
        value = value.redistribute(param.device_mesh, param.placements)
    return local(value)
