"""The CPU kernel of TernaryAdamW: a C++ library behind a plain C interface (native/ternary.h), loaded with ctypes.

It is built with the package where a compiler is found. Where it is not, or for what it does not take, the rule in plain
torch runs instead, with the same decisions; :func:`status` says which and why. One thread count serves torch and the
kernel: ``torch.get_num_threads()``.
"""

import ctypes
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INTERFACE = 6
"""The version of native/ternary.h that this module mirrors."""
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_FOLDER = Path(__file__).parent


class _Rule(ctypes.Structure):
    """The fields of ``LeantuneTernary`` from lr to sampled: the numbers of a step, the same for many parameters."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("lr", "decay", "beta1", "rest1", "release", "beta2", "rest2", "bias")),
        *((name, ctypes.c_float) for name in ("eps", "grad_scale")),
        *((name, ctypes.c_int32) for name in ("refresh", "sampled")),
    )


class _Call(ctypes.Structure):
    """``LeantuneTernary`` of native/ternary.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "cols", "first_row", "grad_row", "grad_column")),
        *((name, ctypes.c_int64) for name in ("blocks_per_row", "bytes_per_row")),
        ("key", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("block", "planes", "rank")),
        *((name, ctypes.c_int32) for name in ("grad_dtype", "weight_dtype", "stochastic", "threads")),
        ("rule", _Rule),
        ("grad", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("remainder", ctypes.c_void_p),
        ("momentum_trits", ctypes.c_void_p * 2),
        ("momentum_scale", ctypes.c_void_p * 2),
        *((name, ctypes.c_void_p) for name in ("variance_trits", "variance_level", "variance_step")),
        *((name, ctypes.c_void_p) for name in ("carry_rows", "carry_columns", "carry_basis", "basis")),
        *((name, ctypes.c_void_p) for name in ("column_means", "new_column_means")),
        *((name, ctypes.c_void_p) for name in ("exact_momentum", "exact_variance")),
    )


@functools.cache
def _load() -> tuple[Any, str]:
    """(the library or None, what to say about it)."""
    found = sorted(_FOLDER.glob("_native.*"))
    if not found:
        return None, "not built (no C++ compiler when leantune was installed); the rule runs in plain torch"
    try:
        library = ctypes.CDLL(str(found[0]))
        version = library.leantune_interface()
    except (OSError, AttributeError) as error:
        return None, f"{found[0].name} could not be loaded ({error}); the rule runs in plain torch"
    if version != INTERFACE:
        return None, (
            f"{found[0].name} was built for interface {version}, this release needs {INTERFACE}: install leantune "
            "again; until then the rule runs in plain torch"
        )
    library.leantune_instructions.restype = ctypes.c_char_p
    library.leantune_use.argtypes = [ctypes.c_char_p]
    arrays, size, integer, call = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.POINTER(_Call)
    library.leantune_update.argtypes = [ctypes.POINTER(call), size]
    library.leantune_ternary_squares.argtypes = [call, arrays]
    library.leantune_ternary_step.argtypes = [call, arrays]
    library.leantune_next_basis.argtypes = [arrays, arrays, size, integer, arrays]
    library.leantune_store.argtypes = [call, arrays, size, size, size, size]
    library.leantune_sums_of_squares.argtypes = [arrays, arrays, arrays, size, integer, arrays]
    return library, "built"


_enabled = True


def enabled() -> bool:
    """False within :class:`reference_rule`; the GPU's kernels heed it too."""
    return _enabled


def status() -> str:
    """What updates ternary states on the CPU: "native (avx2)", or the plain rule and why."""
    library, note = _load()
    if not _enabled:
        return "turned off; the rule runs in plain torch"
    return note if library is None else f"native ({library.leantune_instructions().decode()})"


class reference_rule:
    """Within this context the plain torch rule runs everywhere: to compare the two, or to rule the kernel out."""

    def __enter__(self) -> None:
        global _enabled
        self._before, _enabled = _enabled, False

    def __exit__(self, *_: object) -> None:
        global _enabled
        _enabled = self._before


def use_instructions(name: str) -> None:
    """Choose among "avx512", "avx2" (equal to the bit) and "portable". Raises ValueError where this CPU lacks it."""
    library, note = _load()
    if library is None or library.leantune_use(name.encode()):
        raise ValueError(f"instruction set {name!r} cannot run here ({note}). Known: avx512, avx2, portable.")


def takes(weight: Tensor, grad: Any, block_size: int) -> bool:
    """Whether the kernel can update this parameter: on the CPU, fp32 or bf16, blocks of a multiple of 16. ``grad``: a
    tensor, or what has a tensor's dtype and device."""
    return (
        _enabled
        and weight.device.type == grad.device.type == "cpu"
        and weight.dtype in _DTYPES
        and grad.dtype in _DTYPES
        and block_size % 16 == 0
        and _load()[0] is not None
    )


def squared_norms(arrays: Sequence[Tensor]) -> list[float | None]:
    """The sum of squares of each, NaN or Inf where an element is; None for what the kernel does not take: it takes fp32
    and bf16 on the CPU, contiguous."""
    taken = [array for array in arrays if _takes_norm(array)]
    count = len(taken)
    sums = (ctypes.c_float * count)()
    if taken:
        addresses = (ctypes.c_void_p * count)(*[array.data_ptr() for array in taken])
        dtypes = (ctypes.c_int32 * count)(*[_DTYPES[array.dtype] for array in taken])
        sizes = (ctypes.c_int64 * count)(*[array.numel() for array in taken])
        _load()[0].leantune_sums_of_squares(addresses, dtypes, sizes, count, torch.get_num_threads(), sums)
    found = {id(array): sums[place] for place, array in enumerate(taken)}
    return [found.get(id(array)) for array in arrays]


def squared_norm(array: Tensor) -> float | None:
    """The same of one, without the lists."""
    if not _takes_norm(array):
        return None
    address, dtype = ctypes.c_void_p(array.data_ptr()), ctypes.c_int32(_DTYPES[array.dtype])
    size, total = ctypes.c_int64(array.numel()), ctypes.c_float()
    places = (ctypes.byref(address), ctypes.byref(dtype), ctypes.byref(size))
    _load()[0].leantune_sums_of_squares(*places, 1, torch.get_num_threads(), ctypes.byref(total))
    return total.value


def _takes_norm(array: Tensor) -> bool:
    return (
        _enabled
        and array.dtype in _DTYPES
        and array.device.type == "cpu"
        and array.layout == torch.strided
        and array.is_contiguous()
        and not hasattr(array, "device_mesh")
        and _load()[0] is not None
    )


def stores(weight: Tensor, values: Tensor) -> bool:
    """Whether :func:`store` can write this weight: bf16 on the CPU, from contiguous fp32 values."""
    return (
        _enabled
        and weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and values.dtype is torch.float32
        and values.is_contiguous()
        and _load()[0] is not None
    )


def store(
    weight: Tensor,
    remainder: Tensor | None,
    values: Tensor,
    place: tuple[int, int],
    key: int,
    first_row: int,
    block_size: int,
) -> None:
    """Write ``values``, fp32 (rows, cols), into the bf16 ``weight`` from row and column ``place`` on, rounded
    stochastically as WeightMatrix.write rounds. ``remainder``: int8, of 24-bit weights; ``block_size``: elements of a
    row that share a ``key`` of random bits, of which the column is a multiple; ``first_row``: index of row 0 in the
    whole parameter."""
    call = _Call(cols=weight.shape[1], first_row=first_row, key=key, block=block_size, threads=torch.get_num_threads())
    call.weight, call.remainder = weight.data_ptr(), None if remainder is None else remainder.data_ptr()
    rows, cols = values.shape
    _load()[0].leantune_store(ctypes.byref(call), values.data_ptr(), place[0], rows, place[1], cols)
    torch.autograd.graph.increment_version([weight] if remainder is None else [weight, remainder])


def note_written(weight: Tensor, state: dict[str, Any]) -> None:
    """Tell autograd what a kernel wrote behind its back: the weight and its state."""
    torch.autograd.graph.increment_version(_written(weight, state))


def _written(weight: Tensor, state: dict[str, Any]) -> list[Tensor]:
    return [weight, *(value for name, value in state.items() if name != "step")]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A whole update and what must live until it has run."""

    call: _Call
    read: tuple[Tensor | None, ...]
    written: list[Tensor]


class _Waiting(threading.local):
    updates: list[_Pending] | None = None


_waiting = _Waiting()


class deferred:
    """Within this context whole updates wait, and run in one call at its end, whatever ends it: between kernels, which
    clear the caches it needs, the interpreter takes several times as long as by itself."""

    def __enter__(self) -> None:
        self._before, _waiting.updates = _waiting.updates, []

    def __exit__(self, *_: object) -> None:
        run_deferred()
        _waiting.updates = self._before


def run_deferred() -> None:
    """Run the updates that wait, if any."""
    if _waiting.updates:
        updates, _waiting.updates = _waiting.updates, []
        _run(updates)


def _run(updates: list[_Pending]) -> None:
    calls = (ctypes.POINTER(_Call) * len(updates))(*(ctypes.pointer(update.call) for update in updates))
    _load()[0].leantune_update(calls, len(updates))
    torch.autograd.graph.increment_version([tensor for update in updates for tensor in update.written])


def _call(weight: Tensor, state: dict[str, Any], block_size: int, first_row: int) -> _Call:
    """A parameter and its state, ternary or exact, as long as they lie where they are."""
    call = _Call(rows=weight.shape[0], cols=weight.shape[1], first_row=first_row, block=block_size)
    call.weight_dtype, call.weight = _DTYPES[weight.dtype], weight.data_ptr()
    address = {name: value.data_ptr() for name, value in state.items()}
    call.remainder = address.get("weight_remainder")
    if "momentum_trits" not in state:
        call.exact_momentum, call.exact_variance = address["momentum"], address["variance"]
        return call
    suffixes = ("", "_2") if "momentum_trits_2" in state else ("",)
    call.planes = len(suffixes)
    for plane, suffix in enumerate(suffixes):
        call.momentum_trits[plane] = address[f"momentum_trits{suffix}"]
        call.momentum_scale[plane] = address[f"momentum_scale{suffix}"]
    call.blocks_per_row, call.bytes_per_row = state["variance_level"].shape[1], state["variance_trits"].shape[1]
    call.variance_trits, call.variance_level = address["variance_trits"], address["variance_level"]
    call.variance_step, call.column_means = address["variance_step"], address["variance_columns"]
    if "carry_rows" in state:
        call.rank, call.carry_rows = state["carry_rows"].shape[1], address["carry_rows"]
        call.carry_columns, call.carry_basis = address["carry_columns"], address["carry_basis"]
    return call


def _set_step(
    call: _Call, grad: Tensor, strides: tuple[int, int], key: int, stochastic: bool, rule: dict[str, float]
) -> None:
    """What changes from step to step."""
    call.grad_dtype, call.grad, call.key = _DTYPES[grad.dtype], grad.data_ptr(), key
    call.grad_row, call.grad_column = strides
    call.stochastic, call.threads = stochastic, torch.get_num_threads()
    call.rule = _rule(**rule)


@functools.lru_cache(maxsize=64)
def _rule(beta1: float, beta2: float, **others: float) -> _Rule:
    return _Rule(beta1=beta1, rest1=1 - beta1, release=beta1 / (1 - beta1), beta2=beta2, rest2=1 - beta2, **others)


class WholeUpdate:
    """Everything a step does to a parameter whose rows are all here, or whose states are exact.

    It keeps addresses and no tensors: :meth:`run` may be called again as long as :meth:`fits` says that nothing has
    moved.

    Args:
        weight: (rows, cols) view of the parameter, fp32 or bf16, contiguous.
        state: the parameter's state tensors by name: momentum and variance in fp32, or those of
            leantune.codec.ternary_state.
        block_size: elements of a block; where the states are exact, of a row that share a key of random bits.
        first_row: index of row 0 in the whole parameter, where these are the rows of a shard.
    """

    def __init__(self, weight: Tensor, state: dict[str, Any], block_size: int, first_row: int = 0) -> None:
        self._call = _call(weight, state, block_size, first_row)
        self._place = _place(weight, state)

    def fits(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> bool:
        """Whether this is still the update of ``param`` (of any shape, contiguous) for a gradient of this layout."""
        return (
            _enabled
            and self._place == _place(param, state)
            and param.is_contiguous()
            and grad.is_contiguous()
            and grad.dtype in _DTYPES
            and grad.device.type == "cpu"
        )

    def run(
        self,
        weight: Tensor,
        grad: Tensor,
        state: dict[str, Any],
        key: int,
        basis: Tensor | None,
        *,
        stochastic: bool,
        **rule: float,
    ) -> None:
        """Run, now or at the end of :class:`deferred`.

        ``grad``: (rows, cols) of any strides, or contiguous of any shape; ``key``: of the random bits of this parameter
        and step; ``basis``: V of this step, bfloat16 (cols, rank), None without a carry; ``rule``: as for
        :class:`TernaryCall`.
        """
        call = self._call
        strides = (grad.stride(0), grad.stride(1)) if grad.dim() == 2 else (call.cols, 1)
        _set_step(call, grad, strides, key, stochastic, rule)
        call.basis = None if basis is None else basis.data_ptr()
        update = _Pending(call, (grad, basis), _written(weight, state))
        if _waiting.updates is None:
            _run([update])
        else:
            _waiting.updates.append(update)


def _place(weight: Tensor, state: dict[str, Any]) -> tuple[Any, ...]:
    """Where a parameter and its state lie."""
    return weight.data_ptr(), weight.numel(), weight.dtype, *(value.data_ptr() for value in state.values())


class TernaryCall:
    """One parameter in one step whose other rows are elsewhere, as the kernel sees it. Every tensor must outlive the
    calls.

    Args:
        weight: (rows, cols) view of the parameter, fp32 or bf16, contiguous.
        grad: (rows, cols), fp32 or bf16, any strides.
        state: the parameter's state tensors by name (leantune.codec.ternary_state).
        block_size: elements of a block.
        key: of the random bits of this parameter and step.
        first_row: index of row 0 in the whole parameter, where these are the rows of a shard.
        stochastic: how a bf16 weight is rounded.
        rule: the fields lr, decay, beta1, beta2, bias, eps, grad_scale as floats; refresh and sampled as bools.
    """

    def __init__(
        self,
        weight: Tensor,
        grad: Tensor,
        state: dict[str, Any],
        block_size: int,
        key: int,
        first_row: int = 0,
        *,
        stochastic: bool,
        **rule: float,
    ) -> None:
        self._weight, self._grad, self._state = weight, grad, state
        self._call = _call(weight, state, block_size, first_row)
        _set_step(self._call, grad, (grad.stride(0), grad.stride(1)), key, stochastic, rule)

    def square_sums(self) -> Tensor:
        """Sums over these rows of the squared gradient, fp64 (cols,)."""
        # dtype and device are named: the user may have set other defaults.
        sums = torch.empty(self._call.cols, dtype=torch.float64, device="cpu")
        _load()[0].leantune_ternary_squares(ctypes.byref(self._call), sums.data_ptr())
        return sums

    def step(self, means: Tensor, basis: Tensor | None) -> Tensor | None:
        """Decode, rule, encode, move the weights.

        ``means``: c that v is coded relative to, fp32 (cols,); ``basis``: V that u is projected onto, bfloat16 (cols,
        rank). Returns Y = u^T u V over these rows, fp32 (cols, rank), or None without a carry or ``refresh``. What
        belongs to the columns is read from the state and left to the caller to write.
        """
        call = self._call
        call.new_column_means = means.data_ptr()
        call.basis = None if basis is None else basis.data_ptr()
        products = torch.empty((call.rank if call.rule.refresh else 0, call.cols), dtype=torch.float32, device="cpu")
        _load()[0].leantune_ternary_step(ctypes.byref(call), products.data_ptr())
        note_written(self._weight, self._state)
        return products.t() if len(products) else None

    @staticmethod
    def next_basis(products: Tensor, basis: Tensor) -> Tensor:
        """:func:`leantune.codec.low_rank.next_basis`."""
        across, following = products.t().contiguous(), torch.empty_like(basis)
        _load()[0].leantune_next_basis(across.data_ptr(), basis.data_ptr(), *basis.shape, following.data_ptr())
        return following
