"""TernaryAdamW: momentum and second moment as trits, with what the quantiser drops applied to the weights at once.

The rule is LaProp (Ziyin et al. 2020: momentum of normalised gradients) with sigma-delta released momentum:

    v    = beta2 v_prev + (1 - beta2) g^2
    n    = g / (sqrt(v / (1 - beta2^t)) + eps)
    u    = beta1 u_prev + (1 - beta1) n
    u_q  = what u decodes to once it is stored: low-rank carry + ternary blocks
    step = (u - beta1 u_q) / (1 - beta1)
    w    = w (1 - lr weight_decay) - lr step

v is stored at every fourth step in the long run (leantune/optim/sampling.py). With exact storage u_q = u and step = u:
that is ``states="exact"``. Otherwise sum(step) = sum(n) - beta1/(1-beta1) u_q
over any run at constant lr, so quantisation errors never accumulate, whatever the quantiser.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from leantune.codec.column_factors import ColumnFactors
from leantune.codec.counter_hash import low_fraction, random_bits, splitmix64, stream_key
from leantune.codec.low_rank import initial_basis, next_basis
from leantune.codec.ternary_state import REPLICATED, TernaryState, by_rows, tensor_specs
from leantune.codec.tiles import TILE_ELEMENTS, BlockGrid, Tile, matrix_shape
from leantune.codec.trits import TRITS_PER_BYTE
from leantune.errors import InvalidArgumentError
from leantune.kernels import gpu, native
from leantune.optim.base import LeanOptimizer, check_betas, check_common
from leantune.optim.conversion import to_own_format, to_torch_adamw
from leantune.optim.gradient import Gradient, TiledGradient, gradient_rows, gradient_tiles
from leantune.optim.report import StateLayout
from leantune.optim.row_shard import RowShard, is_sharded, row_shard
from leantune.optim.sampling import Sampling, every_step, sampling
from leantune.optim.weights import WeightMatrix, bits_block, master_spec, rounds_stochastically

MIN_COLUMNS = 16
"""Matrices with fewer columns keep exact state: block scalars would outweigh the trits."""
MAX_CARRY_BYTES = 0.25
"""Bytes per parameter that a carry may cost; a matrix too thin for it keeps none."""
REFRESH_EVERY = 2
"""Steps between new bases V of a carry. Of what four directions hold of momentum, every step would hold 0.4 % more and
every third 1 to 7 % less (docs/ternary_states.md)."""


def normalised_momentum(
    grad: Tensor, momentum: Tensor, variance: Tensor, beta1: float, beta2: float, bias: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """LaProp's pure rule: (n, u, v) from g, u_prev and v_prev, all fp32 and of one shape; ``bias`` = 1 / (1 - beta2^t).
    ``variance`` is overwritten by v."""
    variance.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = torch.mul(variance, bias).sqrt_().add_(eps)
    normalised = torch.div(grad, denominator, out=denominator)
    return normalised, torch.lerp(momentum, normalised, 1 - beta1), variance


def released_step(momentum: Tensor, decoded: Tensor, beta1: float) -> Tensor:
    """step = (u - beta1 u_q) / (1 - beta1): u itself, plus what storing it dropped, at the weight it would have had
    later."""
    return torch.sub(momentum, decoded, alpha=beta1).mul_(1 / (1 - beta1))


class TernaryAdamW(LeanOptimizer):
    """AdamW's quality with states in {-1, 0, +1}: about 0.45 bytes of state a parameter instead of 8.

    Args:
        params: parameters, named parameters or groups. Contiguous float32, bfloat16 or float16.
        lr: learning rate (float or tensor, read at every update).
        betas: decay of momentum and of the second moment, each in [0, 1).
        eps: added to the root of the second moment; above 0.
        weight_decay: decoupled, as in AdamW.
        carry_rank: rank of the exact low-rank part of momentum; 0 turns it off. 2 * rank * (rows + 2 * cols) bytes.
        momentum_planes: trits an element for momentum, 1 or 2 (0.45 or 0.67 B/param).
        block_size: elements that share scales; a multiple of 8.
        states: "ternary", or "exact" for fp32 states (8 B/param), per group. Vectors and matrices under 16 columns are
            exact.
        rounding: of weights under 32 bits: "stochastic" (the meaning of None) or "nearest".
        master_bits: 24 keeps an 8-bit remainder beside each bfloat16 weight (1 B/param).
        seed: of the counter hash behind stochastic rounding.

    Raises:
        InvalidArgumentError, InvalidTypeError: before anything is changed.

    >>> layer = torch.nn.Linear(256, 64)
    >>> optimizer = TernaryAdamW(layer.named_parameters(), lr=1e-3)
    >>> layer(torch.ones(2, 256)).sum().backward(); _ = optimizer.step()
    >>> [row.storage for row in optimizer.report().rows]
    ['ternary', 'exact fp32']

    Source: the scheme is described in docs/ternary_states.md.
    """

    convertible = True
    structural = ("states", "block_size", "momentum_planes", "carry_rank", "master_bits")
    gradient_response = "normalised"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        carry_rank: int = 4,
        momentum_planes: int = 1,
        block_size: int = 128,
        states: str = "ternary",
        rounding: str | None = None,
        master_bits: int | None = None,
        seed: int = 0,
    ) -> None:
        self._known: dict[Tensor, tuple[list[Any], native.WholeUpdate | None]] = {}
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "carry_rank": carry_rank,
                "momentum_planes": momentum_planes,
                "block_size": block_size,
                "states": states,
                "rounding": rounding,
                "master_bits": master_bits,
                "seed": seed,
            },
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        check_common(group)
        check_betas(group)
        if group["states"] not in ("ternary", "exact"):
            raise InvalidArgumentError(f"states is {group['states']!r}; write 'ternary' or 'exact'.")
        if group["momentum_planes"] not in (1, 2):
            raise InvalidArgumentError(f"momentum_planes is {group['momentum_planes']!r}; write 1 or 2.")
        rank, block = group["carry_rank"], group["block_size"]
        if not isinstance(rank, int) or not 0 <= rank <= 64:
            raise InvalidArgumentError(f"carry_rank is {rank!r}; it must be an int from 0 (no carry) to 64.")
        if not isinstance(block, int) or block % 8 or not 16 <= block <= 4096:
            raise InvalidArgumentError(
                f"block_size is {block!r}; it must be a multiple of 8 from 16 to 4096 (128 is tested most)."
            )

    def update(
        self, param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any], grad_scale: float = 1.0
    ) -> None:
        """:meth:`LeanOptimizer.update`; the CPU kernel's call is kept, and run again while nothing has moved."""
        settings = [group[name] for name in self.structural]
        known, whole = self._known.get(param, (None, None))
        number = int(state["step"]) + 1 if state else 1
        # The first step begins with another basis of its carry.
        if whole is None or known != settings or number == 1 or not whole.fits(param, grad, state):
            super().update(param, grad, group, state, grad_scale)
            self._known[param] = settings, _whole_update(param, grad, group, state)
            return
        state["step"] += 1
        numbers = _Numbers(group, number, grad_scale)
        key = stream_key(int(group["seed"]), number, self._position(param))
        basis = state.get("carry_basis")
        sampled = numbers.every_step if "momentum" in state else numbers.sampling
        stochastic = rounds_stochastically(param, group["rounding"])
        whole.run(param, grad, state, key, basis, **numbers.for_kernels(sampled, stochastic))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._known = {}

    def _layout(self, param: Tensor, group: dict[str, Any]) -> StateLayout:
        return _layout(tuple(param.shape), param.dtype, *(group[key] for key in self.structural))

    def exact_state_dict(self) -> dict[str, Any]:
        """This state as torch.optim.AdamW's: fp32 moments, 8 bytes a parameter, and its groups' settings.

        ``torch.optim.AdamW(params).load_state_dict(optimizer.exact_state_dict())`` goes on with AdamW. What the carry
        and the trits hold of momentum is what AdamW gets; sharded parameters raise StateMismatchError.
        """
        return to_torch_adamw(self)

    def load_state_dict(self, state_dict: dict[str, Any], convert: bool = False) -> None:
        """Restore a state saved by ``state_dict()``, or take over torch AdamW's, which is coded into trits.

        ``convert``: also take a TernaryAdamW's state with another block size, rank, number of planes or storage, coded
        anew for this optimizer's settings: that loses as much as storing loses in a step, once.
        Raises StateMismatchError, with nothing changed, for anything else.
        """
        super().load_state_dict(to_own_format(self, state_dict, convert))

    def _apply(
        self, shard: RowShard, grad: Gradient, group: dict[str, Any], state: dict[str, Any], grad_scale: float, key: int
    ) -> None:
        state = by_rows(state, shard.shape)
        weight = WeightMatrix(shard, group["rounding"], state.get("weight_remainder"), key)
        step = _Step(group, int(state["step"]), grad_scale, key, shard)
        if "momentum_trits" in state:
            stored = TernaryState(state, group["block_size"])
            rank = state["carry_rows"].shape[1] if stored.has_carry else 0
            if gpu.takes(weight.matrix, grad, group["block_size"], rank):
                step.compiled(gpu.TernaryCall, weight, grad, state, stored)
            elif native.takes(weight.matrix, grad, group["block_size"]):
                step.compiled(native.TernaryCall, weight, grad, state, stored)
            else:
                step.ternary(weight, grad, stored)
        elif native.takes(weight.matrix, grad, 16):
            step.exact_compiled(weight, grad, state)
        else:
            step.exact(weight, grad, state["momentum"].view(grad.shape), state["variance"].view(grad.shape))


def _whole_update(
    param: Tensor, grad: Tensor, group: dict[str, Any], state: dict[str, Any]
) -> native.WholeUpdate | None:
    """The CPU kernel's update of a parameter that is wholly here and has a state; None where something else runs."""
    if is_sharded(param) or not state or not param.numel():
        return None
    ternary = "momentum_trits" in state
    if not native.takes(param, grad, group["block_size"] if ternary else 16):
        return None
    matrix = row_shard(param).matrix
    block = int(group["block_size"]) if ternary else bits_block(matrix.shape[1])
    return native.WholeUpdate(matrix, by_rows(state, tuple(param.shape)), block)


def _cut(weight: Tensor, tensors: dict[str, Any], top: int, rows: int) -> tuple[Tensor, dict[str, Any]]:
    """Some rows of a matrix and of its state; what belongs to the columns stays whole."""
    if rows == weight.shape[0]:
        return weight, tensors
    here = {
        name: value if name == "step" or name in REPLICATED else value[top : top + rows]
        for name, value in tensors.items()
    }
    return weight[top : top + rows], here


def _sum(parts: Iterable[Any]) -> Any:
    """The parts added up in their order, into the first of them; None where they are None."""
    total = None
    for part in parts:
        total = part if total is None or part is None else total.add_(part)
    return total


class _Numbers:
    """The settings of a group in one of its steps, as plain numbers."""

    def __init__(self, group: dict[str, Any], number: int, grad_scale: float) -> None:
        self.lr = float(group["lr"])
        self.decay = 1 - self.lr * float(group["weight_decay"])
        self.beta1, self.beta2 = (float(beta) for beta in group["betas"])
        self.sampling = sampling(number, self.beta2)
        self.every_step = every_step(number, self.beta2)
        self.eps = float(group["eps"])
        self.block_size = int(group["block_size"])
        self.number = number
        self.refresh = (number - 1) % REFRESH_EVERY == 0
        self.grad_scale = grad_scale

    def for_kernels(self, sampling: Sampling, stochastic: bool) -> dict[str, Any]:
        """The rule's numbers, as kernels take them."""
        return {
            "lr": self.lr,
            "decay": self.decay,
            "beta1": self.beta1,
            "beta2": sampling.beta2,
            "bias": sampling.bias,
            "eps": self.eps,
            "grad_scale": self.grad_scale,
            "stochastic": stochastic,
            "refresh": self.refresh,
            "sampled": sampling.stored,
        }


class _Step(_Numbers):
    """One step of one parameter, walked over the tiles."""

    def __init__(self, group: dict[str, Any], number: int, grad_scale: float, key: int, shard: RowShard) -> None:
        super().__init__(group, number, grad_scale)
        self.key = key
        self.shard = shard

    def exact(self, weight: WeightMatrix, grad: Gradient, momentum: Tensor, variance: Tensor) -> None:
        """fp32 states of the weight's (rows, cols): nothing is dropped, so the step is u."""
        for tile, part in gradient_tiles(grad, column_unit=self.block_size):
            g = self._scaled(part)
            _, u, v = self._rule(g, tile.of(momentum), tile.of(variance).clone(), self.every_step)
            tile.of(momentum).copy_(u)
            tile.of(variance).copy_(v)
            self._move(weight, tile, u, None)

    def exact_compiled(self, weight: WeightMatrix, grad: Gradient, tensors: dict[str, Any]) -> None:
        """The same as :meth:`exact`, in the CPU kernel."""
        rule = self.for_kernels(self.every_step, weight.stochastic)
        for top, part in gradient_rows(grad):
            matrix, here = _cut(weight.matrix, tensors, top, part.shape[0])
            whole = native.WholeUpdate(matrix, here, weight.block_size, self.shard.first_row + top)
            whole.run(matrix, part, here, self.key, None, **rule)
            if isinstance(grad, TiledGradient):
                native.run_deferred()  # the next tile takes this one's memory

    def ternary(self, weight: WeightMatrix, grad: Gradient, state: TernaryState) -> None:
        """A tile at a time: decode it, apply the rule, encode it, move the weights."""
        unit, device = TRITS_PER_BYTE * self.block_size, weight.matrix.device
        grid_of = functools.cache(lambda cols: BlockGrid(cols, self.block_size, device))
        means = self._column_means(state, lambda: self._square_sums(grad, unit, device))
        factors = ColumnFactors(means)
        basis, projector = self._bases(state, factors.live)
        products = None
        if projector is not None and self.refresh:
            products = torch.zeros_like(projector, dtype=torch.float32)
        for tile, part in gradient_tiles(grad, unit):
            grid = grid_of(tile.cols)
            top, first = self.shard.first_row + tile.top, tile.left // self.block_size
            bits = random_bits(self.key, top, tile.rows, first, grid.blocks, self.block_size, device)
            v, x = state.variance(tile, grid)
            _, u, v = self._rule(grid.split(self._scaled(part)), state.momentum(tile, grid), v, self.sampling)
            state.write_variance(tile, grid, v, x, low_fraction(bits), factors, only_empty=not self.sampling.stored)
            carry = None
            if projector is not None:
                projected = grid.join(u) @ projector.float()
                if products is not None:
                    products.addmm_(grid.join(u).t(), projected)
                carry = projected.to(torch.bfloat16), projector
            decoded = state.write_momentum(tile, grid, u, carry)
            self._move(weight, tile, grid.join(released_step(u, decoded, self.beta1)), grid.join(bits))
        state.write_columns(means, self._carry_columns(basis, projector, products, next_basis))

    def compiled(
        self,
        kernel: type[native.TernaryCall] | type[gpu.TernaryCall],
        weight: WeightMatrix,
        grad: Gradient,
        tensors: dict[str, Any],
        state: TernaryState,
    ) -> None:
        """The same as :meth:`ternary`, in the kernel of this device, which takes the state's ``tensors`` as they
        are."""
        block, rule = self.block_size, self.for_kernels(self.sampling, weight.stochastic)
        if kernel is native.TernaryCall and not self.shard.groups and isinstance(grad, Tensor):
            whole = native.WholeUpdate(weight.matrix, tensors, block)
            whole.run(weight.matrix, grad, tensors, self.key, self._basis(state), **rule)
            return

        def calls() -> Iterator[native.TernaryCall | gpu.TernaryCall]:
            for top, part in gradient_rows(grad):
                matrix, here = _cut(weight.matrix, tensors, top, part.shape[0])
                yield kernel(matrix, part, here, block, self.key, self.shard.first_row + top, **rule)

        means = self._column_means(state, lambda: _sum(call.square_sums() for call in calls()))
        basis, projector = self._bases(state, (means > 0).float())
        products = _sum(call.step(means, projector) for call in calls())
        state.write_columns(means, self._carry_columns(basis, projector, products, kernel.next_basis))

    def _square_sums(self, grad: Gradient, unit: int, device: torch.device) -> Tensor:
        """Sums of g^2 over the rows that are here, fp64 (cols,)."""
        sums = torch.zeros(grad.shape[1], dtype=torch.float64, device=device)
        for tile, part in gradient_tiles(grad, unit):
            sums[tile.left : tile.right] += self._scaled(part).square().sum(dim=0, dtype=torch.float64)
        return sums

    def _column_means(self, state: TernaryState, square_sums: Callable[[], Tensor]) -> Tensor:
        """c = beta2 c + (1 - beta2) mean over all rows of g^2, fp32 (cols,), where v is stored; else c. In fp64, sums
        over rows come out the same however the rows are shared out; no two operations are fused, so that every kernel
        gets these bits."""
        if not self.sampling.stored:
            return state.column_means
        mean = self.shard.total(square_sums()).div_(self.shard.all_rows).float()
        return mean.sub_(state.column_means).mul_(1 - self.sampling.beta2).add_(state.column_means)

    def _basis(self, state: TernaryState) -> Tensor | None:
        """V for this step, bfloat16 (cols, rank), or None without a carry."""
        if not state.has_carry:
            return None
        cols, rank = state.basis.shape
        # The state begins as zeros.
        return state.basis if self.number > 1 else initial_basis(cols, rank, splitmix64(self.key), state.basis.device)

    def _bases(self, state: TernaryState, live: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """V, and V as u is projected onto it: without dead columns (``live`` 0), which must not move."""
        basis = self._basis(state)
        return basis, None if basis is None else basis * live.to(torch.bfloat16).unsqueeze(1)

    def _carry_columns(
        self,
        basis: Tensor | None,
        projector: Tensor | None,
        products: Tensor | None,
        next_basis: Callable[[Tensor, Tensor], Tensor],
    ) -> tuple[Tensor, Tensor] | None:
        """(V that u was coded against, V for the next step), from Y = u^T u V of the rows that are here; without Y, V
        stays."""
        if basis is None or projector is None:
            return None
        return projector, basis if products is None else next_basis(self.shard.total(products), basis)

    def _scaled(self, part: Tensor) -> Tensor:
        return part.float() if self.grad_scale == 1.0 else part.float() * self.grad_scale

    def _rule(
        self, grad: Tensor, momentum: Tensor, variance: Tensor, sampling: Sampling
    ) -> tuple[Tensor, Tensor, Tensor]:
        return normalised_momentum(grad, momentum, variance, self.beta1, sampling.beta2, sampling.bias, self.eps)

    def _move(self, weight: WeightMatrix, tile: Tile, step: Tensor, bits: Tensor | None) -> None:
        values = weight.read(tile)
        if self.decay != 1:
            values.mul_(self.decay)
        weight.write(tile, values.sub_(step, alpha=self.lr), bits)


@functools.lru_cache(maxsize=4096)
def _layout(
    shape: tuple[int, ...], dtype: torch.dtype, states: str, block_size: int, planes: int, rank: int, master: int | None
) -> StateLayout:
    """The layout of a parameter's state, which every step compares with what is there. The settings are those of
    ``TernaryAdamW.structural``, in its order."""
    remainder = master_spec(shape, dtype, master)
    rows, cols = matrix_shape(shape)
    reason = _reason_for_exact(shape, cols, states)
    if reason:
        exact = dict.fromkeys(("momentum", "variance"), (shape, torch.float32))
        return StateLayout("exact fp32", reason, exact | remainder)
    rank, note = _carry_rank(rows, cols, rank, planes)
    return StateLayout("ternary", note, tensor_specs(shape, block_size, planes, rank) | remainder, REPLICATED)


def _reason_for_exact(shape: tuple[int, ...], cols: int, states: str) -> str:
    if states == "exact":
        return 'states="exact" was asked for'
    if len(shape) < 2:
        return "vector"
    if cols < MIN_COLUMNS:
        return f"fewer than {MIN_COLUMNS} columns"
    return ""


def _carry_rank(rows: int, cols: int, rank: int, planes: int) -> tuple[int, str]:
    """The rank this matrix carries, and what to say about it. Decided on the whole parameter's shape."""
    said = f"{planes} momentum plane{'s' if planes == 2 else ''}"
    if rank == 0:
        return 0, f"{said}, no carry"
    if rows * cols == 0 or 2 * rank * (rows + cols) > MAX_CARRY_BYTES * rows * cols:
        return 0, f"{said}, no carry: too thin for rank {rank}"
    if cols > TILE_ELEMENTS:
        return 0, f"{said}, no carry: rows longer than {TILE_ELEMENTS:,}"
    return rank, f"{said}, carry of rank {rank}"
