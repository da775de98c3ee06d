"""States in another format: to and from torch's AdamW, and from one block size, plane count or rank to another.

TernaryAdamW's momentum u is of normalised gradients, AdamW's m of gradients:  m = u (sqrt(v / (1 - beta2^t)) + eps).
Both keep the same v. Where no gradient was ever seen (v = 0) both momenta are 0.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leantune.codec.column_factors import ColumnFactors
from leantune.codec.counter_hash import low_fraction, random_bits, splitmix64, stream_key
from leantune.codec.low_rank import initial_basis, next_basis
from leantune.codec.ternary_state import TernaryState, by_rows
from leantune.codec.tiles import BlockGrid, Tile, matrix_shape, tiles
from leantune.codec.trits import TRITS_PER_BYTE
from leantune.errors import StateMismatchError
from leantune.optim.row_shard import is_sharded
from leantune.optim.sampling import stored_share

if TYPE_CHECKING:
    from leantune.optim.ternary_adamw import TernaryAdamW

Moments = Callable[[Tile], tuple[Tensor, Tensor]]
"""(u, v) of a tile, fp32 (rows, cols)."""

_NOTHING = 2.0**-125
"""A second moment below this says that no gradient was ever seen."""
_SHARED = ("lr", "betas", "eps", "weight_decay")
_CARRY_ITERATIONS = 3
"""Power iterations from noise when a carry is made anew; a step makes one, from the carry before."""


def to_torch_adamw(optimizer: "TernaryAdamW") -> dict[str, Any]:
    """What ``torch.optim.AdamW(...).load_state_dict`` takes: fp32 exp_avg and exp_avg_sq, 8 bytes a parameter."""
    _refuse_sharded(optimizer)
    groups, states, number = [], {}, 0
    for group in optimizer.param_groups:
        numbers = range(number, number + len(group["params"]))
        number += len(group["params"])
        names = {"param_names": list(group["param_names"])} if "param_names" in group else {}
        theirs = torch.optim.AdamW([torch.zeros(1)]).defaults | {key: group[key] for key in _SHARED} | names
        groups.append(theirs | {"params": list(numbers)})
        for place, param in zip(numbers, group["params"], strict=True):
            if optimizer.state.get(param):
                states[place] = _exported(optimizer.state[param], param, group)
    return {"state": states, "param_groups": groups}


def to_own_format(optimizer: "TernaryAdamW", saved: Any, convert: bool) -> Any:
    """``saved`` as ``optimizer`` itself would have saved it, where it is torch AdamW's state, or, with ``convert``, a
    TernaryAdamW's with other settings; anything else as it is."""
    if not isinstance(saved, dict) or not isinstance(saved.get("param_groups"), list):
        return saved
    groups = saved["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        return saved
    foreign = all("format_version" not in group and "amsgrad" in group for group in groups)
    if foreign:
        _check_adamw(groups)
    elif not convert or any("carry_rank" not in group for group in groups):
        return saved
    _refuse_sharded(optimizer)
    new_groups, states = [], {}
    for mine, theirs in zip(optimizer.param_groups, groups, strict=True):
        if len(mine["params"]) != len(theirs["params"]):
            return saved
        if foreign:
            kept = {key: theirs[key] for key in (*_SHARED, "params", "initial_lr") if key in theirs}
            new = {**mine, **kept}
        else:
            new = {**theirs, **{key: mine[key] for key in optimizer.structural}}
        new_groups.append(new)
        for param, number in zip(mine["params"], theirs["params"], strict=True):
            if number in saved["state"]:
                source = saved["state"][number]
                read = _adamw_moments(source, param, new) if foreign else _own_moments(source, param, theirs)
                unit = math.lcm(*(TRITS_PER_BYTE * int(group.get("block_size", 128)) for group in (new, theirs)))
                states[number] = _recoded(optimizer, param, new, read, source, unit)
    return {**saved, "state": states, "param_groups": new_groups}


def _check_adamw(groups: list[dict[str, Any]]) -> None:
    for index, group in enumerate(groups):
        wrong = [key for key in ("amsgrad", "maximize") if group.get(key)]
        if group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
            wrong.append("weight decay that is added to the gradient (Adam, not AdamW)")
        if wrong:
            raise StateMismatchError(
                f"group {index} of the saved torch state has {', '.join(wrong)}, which TernaryAdamW does not do; "
                "nothing has been changed."
            )


def _refuse_sharded(optimizer: "TernaryAdamW") -> None:
    if any(is_sharded(param) for group in optimizer.param_groups for param in group["params"]):
        raise StateMismatchError(
            "states of sharded parameters are not converted: load the whole checkpoint on one process, convert it "
            "there, and save it for the others. Nothing has been changed."
        )


# -- reading ----------------------------------------------------------------------------------------------------------


def _adamw_moments(source: dict[str, Any], param: Tensor, group: dict[str, Any]) -> Moments:
    if not {"step", "exp_avg", "exp_avg_sq"} <= set(source):
        raise StateMismatchError(f"a saved AdamW state holds {sorted(source)}; expected step, exp_avg and exp_avg_sq.")
    matrix = matrix_shape(param.shape)
    for name in ("exp_avg", "exp_avg_sq"):
        if tuple(source[name].shape) != tuple(param.shape):
            raise StateMismatchError(
                f"saved {name} has shape {tuple(source[name].shape)}, the parameter {tuple(param.shape)}: the state "
                "belongs to another model. Nothing has been changed."
            )
    m, v = (source[name].reshape(matrix) for name in ("exp_avg", "exp_avg_sq"))
    denominator = _denominator(group, int(source["step"]))

    def read(tile: Tile) -> tuple[Tensor, Tensor]:
        variance = tile.of(v).to(param.device, torch.float32, copy=True)
        momentum = tile.of(m).to(param.device, torch.float32) / denominator(variance)
        return momentum.masked_fill_(variance < _NOTHING, 0.0), variance

    return read


def _own_moments(source: dict[str, Any], param: Tensor, group: dict[str, Any]) -> Moments:
    matrix = matrix_shape(param.shape)
    if "momentum_trits" not in source:
        u, v = source["momentum"].reshape(matrix), source["variance"].reshape(matrix)
        return lambda tile: (tile.of(u).to(param.device), tile.of(v).to(param.device))
    block = int(group["block_size"])
    here = {name: value.to(param.device) for name, value in source.items() if isinstance(value, Tensor)}
    here = by_rows(here, tuple(param.shape))
    state = TernaryState(here, block)
    share = stored_share(int(source["step"]), float(group["betas"][1]))

    def read(tile: Tile) -> tuple[Tensor, Tensor]:
        grid = BlockGrid(tile.cols, block, param.device)
        variance = grid.join(state.variance(tile, grid)[0]).div_(share)
        return grid.join(state.momentum(tile, grid)), variance.masked_fill(variance < _NOTHING, 0.0)

    return read


def _denominator(group: dict[str, Any], step: int) -> Callable[[Tensor], Tensor]:
    """sqrt(v / (1 - beta2^t)) + eps."""
    correction, eps = 1 - float(group["betas"][1]) ** max(step, 1), float(group["eps"])
    return lambda variance: (variance / correction).sqrt_().add_(eps)


# -- writing ----------------------------------------------------------------------------------------------------------


def _exported(state: dict[str, Any], param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    matrix, read = matrix_shape(param.shape), _own_moments(state, param, group)
    m, v = (torch.zeros(matrix, dtype=torch.float32, device=param.device) for _ in range(2))
    denominator = _denominator(group, int(state["step"]))
    for tile in tiles(*matrix, column_unit=TRITS_PER_BYTE * int(group["block_size"])):
        momentum, variance = read(tile)
        tile.of(v).copy_(variance)
        tile.of(m).copy_(momentum * denominator(variance)).masked_fill_(variance < _NOTHING, 0.0)
    step = torch.tensor(float(state["step"]), dtype=torch.float32)
    return {"step": step, "exp_avg": m.view(param.shape), "exp_avg_sq": v.view(param.shape)}


def _recoded(
    optimizer: "TernaryAdamW", param: Tensor, group: dict[str, Any], read: Moments, source: dict[str, Any], unit: int
) -> dict[str, Tensor]:
    """The state of one parameter in the format that ``group`` asks for, coded anew from (u, v). ``unit``: columns on
    whose multiples both formats can be cut."""
    layout, step = optimizer._layout(param, group), int(source["step"])
    made = {
        name: torch.zeros(shape, dtype=dtype, device=param.device) for name, (shape, dtype) in layout.tensors.items()
    }
    if "weight_remainder" in made and "weight_remainder" in source:
        made["weight_remainder"].copy_(source["weight_remainder"])
    rows, cols = matrix_shape(param.shape)
    walk = list(tiles(rows, cols, column_unit=unit))
    if "momentum_trits" not in made:
        for tile in walk:
            for name, value in zip(("momentum", "variance"), read(tile), strict=True):
                tile.of(made[name].view(rows, cols)).copy_(value)
    elif rows * cols:
        key = stream_key(int(group["seed"]), step, optimizer._position(param))
        share = stored_share(step, float(group["betas"][1]))

        def stored(tile: Tile) -> tuple[Tensor, Tensor]:
            momentum, variance = read(tile)
            return momentum, variance * share

        _encode(by_rows(made, tuple(param.shape)), int(group["block_size"]), walk, stored, key)
    return {**made, "step": torch.tensor(step, dtype=torch.int64)}


def _encode(tensors: dict[str, Tensor], block: int, walk: list[Tile], read: Moments, key: int) -> None:
    state, device = TernaryState(tensors, block), tensors["momentum_trits"].device
    rows, cols = len(tensors["momentum_trits"]), len(tensors["variance_columns"])
    sums = torch.zeros(cols, dtype=torch.float64, device=device)
    for tile in walk:
        sums[tile.left : tile.right] += read(tile)[1].sum(dim=0, dtype=torch.float64)
    means = (sums / rows).float()
    factors = ColumnFactors(means)
    live = factors.live.to(torch.bfloat16).unsqueeze(1)
    bases = [initial_basis(cols, state.basis.shape[1], splitmix64(key), device)] if state.has_carry else []
    for _ in range(_CARRY_ITERATIONS if bases else 0):
        products = torch.zeros_like(bases[-1], dtype=torch.float32)
        for tile in walk:
            momentum = read(tile)[0]
            products.addmm_(momentum.t(), momentum @ bases[-1].float())
        bases.append(next_basis(products, bases[-1]))
    carry_columns = (bases[-1] * live, bases[-1]) if bases else None
    for tile in walk:
        grid = BlockGrid(tile.cols, block, device)
        bits = random_bits(key, tile.top, tile.rows, tile.left // block, grid.blocks, block, device)
        momentum, variance = read(tile)
        values = grid.split(variance).contiguous()
        state.write_variance(tile, grid, values, torch.zeros_like(values), low_fraction(bits), factors)
        carry = None
        if carry_columns is not None:
            carry = (momentum @ carry_columns[0].float()).to(torch.bfloat16), carry_columns[0]
        state.write_momentum(tile, grid, grid.split(momentum), carry)
    state.write_columns(means, carry_columns)
