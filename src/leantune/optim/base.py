"""What every leantune optimizer is: a ``torch.optim.Optimizer`` whose ``update`` moves one parameter by one gradient.

``step()`` walks ``update`` over all parameters; ``FusedBackward`` calls the same ``update`` from inside backward.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from leantune.codec.counter_hash import stream_key
from leantune.errors import BackwardError, InvalidArgumentError, InvalidTypeError, NonFiniteError, StateMismatchError
from leantune.kernels import native
from leantune.optim.gradient import Gradient, TiledGradient, squared_norm, whole_squared_norm
from leantune.optim.report import ParameterState, StateLayout, StateReport
from leantune.optim.row_shard import RowShard, is_sharded, local, placed_like, row_shard, rows_of, whole_tensor

FORMAT_VERSION = 1
_FREE_GROUP_KEYS = {"params", "param_names", "name", "initial_lr", "swa_lr", "max_lr", "min_lr"}
_FREE_GROUP_KEYS |= {"base_momentum", "max_momentum"}
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LeanOptimizer(torch.optim.Optimizer):
    """Base of the rules. A subclass gives ``_check_group``, ``_layout`` and ``_apply``."""

    structural: tuple[str, ...] = ("rounding", "master_bits")
    """Group keys that decide what the state tensors are; a checkpoint must agree on them."""

    convertible: bool = False
    """Whether load_state_dict(..., convert=True) takes a state with other structural settings."""

    gradient_response: str | None = None
    """How an element's step follows the scale of its gradients: "normalised" (not at all), "linear", or None: it
    depends on other elements."""

    shardable: bool = True
    """Whether a parameter may be a DTensor sharded by rows."""

    tileable: bool = True
    """Whether `update_in_tiles` works: the rule can take a gradient some rows at a time."""

    least_trial_rows: int = 1
    """Rows from which on the update of a matrix goes the way of a taller one, for those who try it on a smaller one."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._positions: dict[Tensor, int] = {}
        self._fused: Any = None
        super().__init__(params, {**defaults, "format_version": FORMAT_VERSION})

    # -- what a rule gives ------------------------------------------------------------------------------------------

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise InvalidArgumentError where a setting of this (complete) group cannot work."""
        check_common(group)

    def _layout(self, param: Tensor, group: dict[str, Any]) -> StateLayout:
        """Which tensors this parameter's state consists of, and why."""
        raise NotImplementedError

    def _apply(
        self, shard: RowShard, grad: Any, group: dict[str, Any], state: dict[str, Any], grad_scale: float, key: int
    ) -> None:
        """Move the rows of a parameter that are here by ``grad * grad_scale``.

        ``grad``: (rows, cols) as the shard, a tensor or, where the rule is ``tileable``, a `TiledGradient`; ``state``:
        this process's part of every tensor, its step counted; ``key`` seeds random bits.
        """
        raise NotImplementedError

    # -- the one path of a gradient ---------------------------------------------------------------------------------

    @torch.no_grad()
    def update(
        self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any], grad_scale: float = 1.0
    ) -> None:
        """Move one parameter by one gradient, whole.

        ``grad``: the parameter's shape, any floating dtype, finite (the caller checks); it is multiplied by
        ``grad_scale`` in fp32. Temporaries stay under 8 MiB whatever the size of the parameter. Of a DTensor every
        process moves its own rows, and all must call this together.
        """
        shard, allocates_only = self._ready(param, group, state)
        if allocates_only and not bool(shard.total(squared_norm(local(grad)))):
            return
        state["step"] += 1
        if param.numel():
            key = self._key(param, group, state)
            here = {name: local(value) for name, value in state.items()} if is_sharded(param) else state
            mine = local(grad)
            matrix = mine.reshape(shard.matrix.shape)
            self._apply(shard, matrix, group, here, grad_scale, key)
            if matrix.data_ptr() != mine.data_ptr():
                native.run_deferred()  # a copy is not kept until the end

    @torch.no_grad()
    def update_in_tiles(
        self, param: Tensor, grad: TiledGradient, group: dict[str, Any], state: dict[str, Any], grad_scale: float = 1.0
    ) -> None:
        """:meth:`update` by a gradient that never exists whole, which is walked as often as the rule looks at it.

        That is once for Lomo and AdamW; once, or twice in steps that store the second moment, for TernaryAdamW; three
        times for AdaLomo. Rows of ``param`` are written while the last walk goes on, and no row before ``grad`` has
        given it: what makes the gradient may read the rows to come. Temporaries are those of :meth:`update`.

        ``param``: a matrix that is wholly here. ``grad``: finite (the caller checks).
        Raises InvalidTypeError for another parameter, or a rule that needs whole gradients (``tileable`` is False).
        """
        if not self.tileable or is_sharded(param) or param.dim() != 2:
            raise InvalidTypeError(
                f"{type(self).__name__} cannot update a parameter of shape {tuple(param.shape)} in tiles: that is for "
                "unsharded matrices, and for rules that need no whole gradient. Call update() with the whole gradient."
            )
        shard, allocates_only = self._ready(param, group, state)
        if allocates_only and not bool(squared_norm(grad)):
            return
        state["step"] += 1
        if param.numel():
            self._apply(shard, grad, group, state, grad_scale, self._key(param, group, state))

    def _ready(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> tuple[RowShard, bool]:
        """(the rows that are here, their state checked or allocated; whether that is all to do if the gradient is 0).

        torch.distributed.checkpoint steps an empty optimizer with lr 0 to learn what its state is made of.
        """
        if state:
            self._check_fits(param, group, state)
            return row_shard(param), False
        shard = row_shard(param)
        self._allocate(param, group, state, shard)
        return shard, float(group["lr"]) == 0

    def _key(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> int:
        return stream_key(int(group["seed"]), int(state["step"]), self._position(param))

    def _allocate(self, param: Tensor, group: dict[str, Any], state: dict[str, Any], shard: RowShard) -> None:
        state["step"] = torch.zeros((), dtype=torch.int64)
        layout = self._layout(param, group)
        for name, (shape, dtype) in layout.tensors.items():
            whole = name in layout.replicated or not is_sharded(param) or not shape
            held = shape if whole else (shard.held, *shape[1:])
            zeros = torch.zeros(held, dtype=dtype, device=shard.matrix.device)
            state[name] = zeros if whole else placed_like(param, zeros, shape)

    def _check_fits(self, param: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Kernels write through pointers: refuse a parameter or a state that is no longer what was allocated."""
        if not param.is_contiguous():
            raise InvalidTypeError(
                f"a parameter of shape {tuple(param.shape)} is no longer contiguous (stride {param.stride()}): its "
                "memory was rearranged after the optimizer was built. Make it so: param.data = param.data.contiguous()."
            )
        for name, (shape, dtype) in self._layout(param, group).tensors.items():
            value = state.get(name)
            if value is None or value.shape != shape or value.dtype != dtype or not local(value).is_contiguous():
                raise StateMismatchError(
                    f"the state of a parameter of shape {tuple(param.shape)} does not fit it ({name} should be "
                    f"contiguous {dtype} {tuple(shape)}): the parameter was replaced or resized after its first step. "
                    "Build a new optimizer, or delete optimizer.state[param]."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient: all of them, or, if any gradient is not finite, none.

        Under a FusedBackward the updates have happened inside backward; ``step()`` then closes the step.
        Raises NonFiniteError naming the parameter; InvalidTypeError for a sparse gradient.
        """
        if self._fused is not None:
            if closure is not None:
                raise BackwardError(
                    "step(closure) runs backward several times, but under FusedBackward every backward already moves "
                    "the weights. Call loss.backward() (or fused.backward(loss)) once and then step()."
                )
            return self._fused.close_step(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients()
        with native.deferred():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        self.update(param, param.grad, group, self.state[param])
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and what a FusedBackward has accumulated of them."""
        super().zero_grad(set_to_none)
        if self._fused is not None:
            self._fused.forget(self)

    def _check_gradients(self) -> None:
        """:meth:`check_gradient` of all there are."""
        found = [
            (param, index, place)
            for index, group in enumerate(self.param_groups)
            for place, param in enumerate(group["params"])
            if param.grad is not None
        ]
        for (param, index, place), norm in zip(found, native.squared_norms([param.grad for param, *_ in found])):
            if norm is None or not math.isfinite(norm):
                self.check_gradient(param, param.grad, index, place)

    def check_gradient(self, param: Tensor, grad: Gradient, group_index: int, place: int) -> float:
        """Refuse a gradient that cannot be applied; returns its squared norm."""
        if isinstance(grad, Tensor) and grad.layout != torch.strided:
            raise InvalidTypeError(
                f"{self.name_of(group_index, place)} has a sparse gradient ({grad.layout}), which "
                f"{type(self).__name__} does not take. Build the embedding with sparse=False."
            )
        norm = whole_squared_norm(param, grad)
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"the gradient of {self.name_of(group_index, place)} holds NaN or Inf (or its squares overflow "
                "float32). Nothing has been updated in this step. Look at the loss and the learning rate; zero_grad() "
                "and go on with the next batch, or stop."
            )
        return norm

    # -- groups -----------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch does; settings it does not name are the optimizer's defaults.

        Raises InvalidArgumentError for an unknown or impossible setting, InvalidTypeError for a parameter this
        optimizer cannot train (integer, complex, sparse, non-contiguous, float64), before anything is added.
        """
        if not isinstance(param_group, dict):
            raise InvalidTypeError(f"a parameter group is a dict with 'params', not {type(param_group).__name__}")
        param_group = dict(param_group)
        params = param_group.get("params", [])
        if isinstance(params, set):
            raise InvalidTypeError(
                "parameters must come in an ordered collection (their order names them); a set is not"
            )
        params = [params] if isinstance(params, Tensor) else list(params)
        param_group["params"] = params
        unknown = set(param_group) - set(self.defaults) - _FREE_GROUP_KEYS
        if unknown:
            raise InvalidArgumentError(
                f"{type(self).__name__} does not know the group setting(s) {sorted(unknown)}; it would be ignored. "
                f"Known: {sorted(set(self.defaults) - {'format_version'})}."
            )
        for place, item in enumerate(params):
            name, param = item if isinstance(item, tuple) else (f"parameter {place}", item)
            _check_parameter(name, param, type(self).__name__)
            if is_sharded(param) and not self.shardable:
                raise InvalidTypeError(
                    f"{name} is a DTensor, and {type(self).__name__} looks at whole columns: it trains unsharded "
                    "parameters alone in this release. Use TernaryAdamW, AdamW, AdaLomo or Lomo."
                )
            if param.dtype is torch.float16 and {**self.defaults, **param_group}.get("master_bits") is not None:
                raise InvalidArgumentError(
                    f"{name} is float16, and master_bits=24 is the 8-bit remainder of bfloat16 weights; it would be "
                    "ignored. Leave master_bits out, or make the model bfloat16."
                )
        self._check_unique(params)
        self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        self._positions = {}

    def _check_unique(self, params: list[Any]) -> None:
        seen = {param for group in self.param_groups for param in group["params"]}
        for place, item in enumerate(params):
            name, param = item if isinstance(item, tuple) else (f"parameter {place}", item)
            if param in seen:
                raise InvalidArgumentError(
                    f"{name} (shape {tuple(param.shape)}) is given twice; it would be stepped twice. Name each "
                    "parameter once (model.parameters() already lists tied weights once)."
                )
            seen.add(param)

    def name_of(self, group_index: int, place: int) -> str:
        """The parameter's name where the optimizer was given named parameters, else its place and shape."""
        group = self.param_groups[group_index]
        if "param_names" in group:
            return str(group["param_names"][place])
        return f"parameter {place} of group {group_index} (shape {tuple(group['params'][place].shape)})"

    def _position(self, param: Tensor) -> int:
        """Place of the parameter in all groups: part of the key of its random bits, the same on every rank and after
        resuming."""
        if param not in self._positions:
            everything = (param for group in self.param_groups for param in group["params"])
            self._positions = {param: place for place, param in enumerate(everything)}
        return self._positions[param]

    # -- report -----------------------------------------------------------------------------------------------------

    def report(self) -> StateReport:
        """Every parameter with its storage, bits, bytes and reason; exact before the first step too."""
        rows = []
        for index, group in enumerate(self.param_groups):
            for place, param in enumerate(group["params"]):
                layout = self._layout(param, group)
                rows.append(ParameterState.of(self.name_of(index, place), param, layout))
        return StateReport(type(self).__name__, rows)

    # -- state dict -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state saved by ``state_dict()``. Every tensor keeps its own dtype (torch would cast it to the
        weight's).

        Everything is checked first: raises StateMismatchError, with nothing changed, where the groups, the format, a
        structural setting or a tensor's shape or dtype does not belong to this optimizer.
        """
        saved = copy.copy(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = hook(self, saved)
            saved = saved if result is None else result
        groups, states = _parts(saved, type(self).__name__)
        self._check_saved_groups(groups)
        new_groups = [self._merged_group(mine, theirs) for mine, theirs in zip(self.param_groups, groups, strict=True)]
        new_state: defaultdict[Tensor, Any] = defaultdict(dict)
        used = set()
        for mine, theirs in zip(new_groups, groups, strict=True):
            for place, (param, number) in enumerate(zip(mine["params"], theirs["params"], strict=True)):
                if number in states:
                    used.add(number)
                    new_state[param] = self._checked_state(states[number], param, mine, place)
        if set(states) - used:
            raise StateMismatchError(
                f"the saved state has entries {sorted(set(states) - used)[:5]} that belong to no saved parameter "
                "group; the file is damaged or was edited. Nothing has been changed."
            )
        self.__setstate__({"state": new_state, "param_groups": new_groups})
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_fused", None)
        self._positions = {}

    def _check_saved_groups(self, groups: list[dict[str, Any]]) -> None:
        if len(groups) != len(self.param_groups):
            raise StateMismatchError(
                f"the saved state has {len(groups)} parameter groups, this optimizer {len(self.param_groups)}. Build "
                "the optimizer with the same groups it was saved with."
            )
        for index, (mine, theirs) in enumerate(zip(self.param_groups, groups, strict=True)):
            if len(mine["params"]) != len(theirs["params"]):
                raise StateMismatchError(
                    f"group {index} has {len(theirs['params'])} parameters in the saved state and "
                    f"{len(mine['params'])} here. Were parameters frozen, unfrozen or tied differently when it was "
                    "saved?"
                )
            version = theirs.get("format_version")
            if version != FORMAT_VERSION:
                raise StateMismatchError(
                    f"group {index} of the saved state has format version {version}, this release reads "
                    f"{FORMAT_VERSION}. It was not saved by this {type(self).__name__}; start a fresh optimizer, or "
                    "load it with the release (or the optimizer) that saved it."
                )
            for key in self.structural:
                if theirs.get(key) != mine[key]:
                    raise StateMismatchError(
                        f"group {index} was saved with {key}={theirs.get(key)!r}, this optimizer has "
                        f"{key}={mine[key]!r}. Build it with {key}={theirs.get(key)!r} to go on from this state"
                        + (", or load_state_dict(state, convert=True) to code it anew." if self.convertible else ".")
                    )

    def _merged_group(self, mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
        merged = {**mine, **{key: copy.deepcopy(value) for key, value in theirs.items() if key != "params"}}
        merged["params"] = mine["params"]
        if "param_names" in mine:
            merged["param_names"] = mine["param_names"]
        self._check_group(merged)
        return merged

    def _checked_state(self, saved: dict[str, Any], param: Tensor, group: dict[str, Any], place: int) -> dict[str, Any]:
        """The saved state of one parameter as new tensors on its device, each checked against the layout."""
        layout, shard = self._layout(param, group), row_shard(param)
        specs = {**layout.tensors, "step": ((), torch.int64)}
        if set(saved) != set(specs):
            raise StateMismatchError(
                f"parameter {place} (shape {tuple(param.shape)}): the saved state holds {sorted(saved)}, "
                f"{type(self).__name__} keeps {sorted(specs)}. It belongs to another optimizer or other settings."
            )
        loaded = {}
        for name, (shape, dtype) in specs.items():
            value = saved[name]
            if not isinstance(value, Tensor) or tuple(value.shape) != tuple(shape) or value.dtype != dtype:
                found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise StateMismatchError(
                    f"parameter {place} (shape {tuple(param.shape)}): saved {name} is {found}, expected {dtype} "
                    f"{tuple(shape)}. The file belongs to another model or was converted; nothing has been changed."
                )
            if value.is_floating_point() and not bool(torch.isfinite(shard.total(squared_norm(local(value))))):
                raise StateMismatchError(
                    f"parameter {place}: saved {name} holds NaN or Inf. Go back to an earlier checkpoint."
                )
            if name == "step" or name in layout.replicated or not is_sharded(param) or not shape:
                part = whole_tensor(value)
                loaded[name] = _copied(part, torch.device("cpu") if name == "step" else shard.matrix.device)
            else:
                part = rows_of(value, param, shard)
                loaded[name] = placed_like(param, _copied(part, shard.matrix.device), shape)
        return loaded


def _copied(value: Tensor, device: torch.device) -> Tensor:
    return value.detach().clone(memory_format=torch.contiguous_format).to(device)


def check_common(group: dict[str, Any]) -> None:
    """Settings every rule shares: lr, weight_decay, rounding, master_bits."""
    for key in ("lr", "weight_decay"):
        if not 0 <= _number(key, group[key]) < float("inf"):
            raise InvalidArgumentError(f"{key} is {group[key]}; it must be a finite number of at least 0.")
    if group["rounding"] not in (None, "stochastic", "nearest"):
        raise InvalidArgumentError(
            f"rounding is {group['rounding']!r}; write 'stochastic', 'nearest', or None (stochastic below 32 bits)."
        )
    if group.get("master_bits") not in (None, 24):
        raise InvalidArgumentError(
            f"master_bits is {group['master_bits']!r}; write 24 (bf16 + 8-bit remainder) or None."
        )
    if not isinstance(group["seed"], int):
        raise InvalidArgumentError(f"seed is {group['seed']!r}; it must be an int.")


def check_betas(group: dict[str, Any]) -> None:
    """betas in [0, 1) and eps positive."""
    betas = group["betas"]
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not pair or not all(0 <= _number("betas", beta) < 1 for beta in betas):
        raise InvalidArgumentError(f"betas is {betas}; it must be two numbers in [0, 1), for example (0.9, 0.999).")
    if not 1e-37 < _number("eps", group["eps"]) < float("inf"):
        raise InvalidArgumentError(
            f"eps is {group['eps']}; it must be finite and above 1e-37: it is all that divides a zero gradient."
        )


def _number(key: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"{key} is {value!r}; it must be a number.") from None


def _check_parameter(name: str, param: Any, optimizer: str) -> None:
    if not isinstance(param, Tensor):
        raise InvalidTypeError(f"{optimizer} trains tensors; {name} is a {type(param).__name__}.")
    if param.layout != torch.strided:
        raise InvalidTypeError(
            f"{name} is a sparse tensor ({param.layout}); {optimizer} trains dense ones: call .to_dense()."
        )
    if param.dtype not in _WEIGHT_DTYPES:
        raise InvalidTypeError(
            f"{name} is {param.dtype}; {optimizer} trains float32, bfloat16 and float16 weights. Freeze it "
            "(requires_grad_(False)) and leave it out, or convert it."
        )
    if not param.is_contiguous():
        raise InvalidTypeError(
            f"{name} (shape {tuple(param.shape)}, stride {param.stride()}) is not contiguous; its blocks would not be "
            "neighbours in memory. Make it so first: param.data = param.data.contiguous()."
        )
    row_shard(param)


def _parts(saved: Any, optimizer: str) -> tuple[list[dict[str, Any]], dict[Any, dict[str, Any]]]:
    if not isinstance(saved, dict) or "param_groups" not in saved or "state" not in saved:
        raise StateMismatchError(
            f"{optimizer}.load_state_dict takes what state_dict() gives: a dict with 'state' and 'param_groups'."
        )
    return saved["param_groups"], saved["state"]
