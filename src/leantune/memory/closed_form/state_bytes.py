"""Bytes of leantune's optimizer states by arithmetic, so that a plan need not load torch.

The layouts are those of `leantune.optim` (tests hold every one against the rule itself); unusual settings are left to
the rule.
"""

from collections.abc import Mapping
from typing import Any

TILE_ELEMENTS = 1 << 17
"""Of `leantune.codec.tiles`."""
_TRITS_A_BYTE = 5
_LEAST_COLUMNS = 16
_CARRY_SHARE = 0.25
_SLOTS, _COLUMN_BYTES, _SHORT_ROWS = 28, 90, 1 << 16
_LEAST_EXPERT_COLUMNS = 16
_TERNARY = {"carry_rank": 4, "momentum_planes": 1, "block_size": 128, "master_bits": None}

Bytes = tuple[int, int]
"""(sharded with a parameter's rows, whole on every process)."""


def state_bytes(name: str, options: Mapping[str, Any], shape: tuple[int, ...], dtype: str) -> Bytes | None:
    """Of one parameter under the rule ``name`` of a config; None where only the rule itself can say."""
    if name == "lomo" and not options:
        return 0, 0
    if name == "adalomo" and not options:
        return _adalomo(shape)
    if name == "taco_one_sparse" and not options:
        return _one_sparse(shape)
    master = options.get("master_bits")
    if master not in (None, 24):
        return None
    remainder = _count(shape) if master == 24 and dtype == "bfloat16" else 0
    if name == "adamw" and not options.keys() - {"master_bits"}:
        return 8 * _count(shape) + remainder, 0
    if name == "ternary_adamw" and not options.keys() - _TERNARY.keys():
        return _ternary(shape, {**_TERNARY, **options}, remainder)
    return None


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _stack(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(matrices, rows, columns), as `leantune.codec.tiles.stack_of`."""
    if len(shape) == 3 and shape[1] > shape[0] and shape[2] >= _LEAST_EXPERT_COLUMNS:
        return shape[0], shape[1], shape[2]
    return 1, shape[0], _count(shape[1:])


def _adalomo(shape: tuple[int, ...]) -> Bytes:
    if len(shape) < 2:
        return 4 * _count(shape), 0
    matrices, rows, columns = _stack(shape)
    return 4 * matrices * rows, 4 * columns


def _one_sparse(shape: tuple[int, ...]) -> Bytes:
    if len(shape) < 2:
        return 4 * _count(shape), 0
    matrices, rows, columns = _stack(shape)
    item = 2 if rows <= _SHORT_ROWS else 4
    slots = min(_SLOTS, (_COLUMN_BYTES - 1) // (item + 1))
    a_column = slots * (item + 1) + 1
    return (4 * _count(shape) if 4 * rows <= a_column else matrices * columns * a_column), 0


def _ternary(shape: tuple[int, ...], options: Mapping[str, Any], remainder: int) -> Bytes | None:
    rank, planes, block = (options[key] for key in ("carry_rank", "momentum_planes", "block_size"))
    if planes not in (1, 2) or not 0 <= rank <= 64 or block % 8 or not 16 <= block <= 4096:
        return None
    matrices, rows, columns = _stack(shape)
    rows *= matrices
    if len(shape) < 2 or columns < _LEAST_COLUMNS:
        return 8 * _count(shape) + remainder, 0
    full, rest = divmod(columns, _TRITS_A_BYTE * block)
    trits, scalars = full * block + -(-rest // _TRITS_A_BYTE), 2 * -(-columns // block)
    if 2 * rank * (rows + columns) > _CARRY_SHARE * rows * columns or columns > TILE_ELEMENTS:
        rank = 0
    a_row = (planes + 1) * trits + (planes + 2) * scalars + 2 * rank
    return rows * a_row + remainder, (4 + 4 * rank) * columns
