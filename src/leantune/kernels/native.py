"""The CPU kernel of TernaryAdamW: a C++ library behind a plain C interface (native/ternary.h), loaded with ctypes.

It is built with the package where a compiler is found. Where it is not, or for what it does not take, the rule in plain
torch runs instead, with the same decisions; :func:`status` says which and why. One thread count serves torch and the
kernel: ``torch.get_num_threads()``.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leantune.codec.factored import Factors

INTERFACE = 2
"""The version of native/ternary.h that this module mirrors."""
CHUNK_BYTES = 2 << 20
"""Bound on the partial sums of the carry's power iteration, fp32 (chunks, rank, cols)."""
MAX_CHUNKS = 16
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_FOLDER = Path(__file__).parent


class _Call(ctypes.Structure):
    """``LeantuneTernary`` of native/ternary.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "cols", "first_row", "grad_row", "grad_column")),
        *((name, ctypes.c_int64) for name in ("blocks_per_row", "bytes_per_row")),
        ("key", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("block", "planes", "rank")),
        *((name, ctypes.c_int32) for name in ("grad_dtype", "weight_dtype", "stochastic", "threads")),
        *((name, ctypes.c_float) for name in ("lr", "decay", "beta1", "rest1", "release", "beta2", "rest2", "bias")),
        *((name, ctypes.c_float) for name in ("eps", "grad_scale")),
        ("grad", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("remainder", ctypes.c_void_p),
        ("momentum_trits", ctypes.c_void_p * 2),
        ("momentum_scale", ctypes.c_void_p * 2),
        *((name, ctypes.c_void_p) for name in ("variance_trits", "variance_level", "variance_step")),
        *((name, ctypes.c_void_p) for name in ("carry_rows", "carry_columns", "new_rows", "new_columns")),
        *((name, ctypes.c_void_p) for name in ("row_factors", "column_factors")),
        *((name, ctypes.c_void_p) for name in ("new_row_factors", "new_column_factors")),
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
    library.leantune_ternary_step.argtypes = [ctypes.POINTER(_Call)]
    library.leantune_ternary_step.restype = None
    library.leantune_ternary_momentum.argtypes = [ctypes.POINTER(_Call), *[ctypes.c_void_p] * 4, ctypes.c_int]
    library.leantune_ternary_momentum.restype = None
    library.leantune_ternary_squares.argtypes = [ctypes.POINTER(_Call), *[ctypes.c_void_p] * 2, ctypes.c_int]
    library.leantune_ternary_squares.restype = None
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
    """Choose among "avx512", "avx2" and "portable" (all give the same bits). Raises ValueError where this CPU lacks
    it."""
    library, note = _load()
    if library is None or library.leantune_use(name.encode()):
        raise ValueError(f"instruction set {name!r} cannot run here ({note}). Known: avx512, avx2, portable.")


def takes(weight: Tensor, grad: Tensor, block_size: int) -> bool:
    """Whether the kernel can update this parameter: on the CPU, fp32 or bf16, blocks of a multiple of 16."""
    return (
        _enabled
        and weight.device.type == grad.device.type == "cpu"
        and weight.dtype in _DTYPES
        and grad.dtype in _DTYPES
        and block_size % 16 == 0
        and _load()[0] is not None
    )


class TernaryCall:
    """One parameter in one step, as the kernel sees it. Every tensor must outlive the calls.

    Args:
        weight: (rows, cols) view of the parameter, fp32 or bf16, contiguous.
        grad: (rows, cols), fp32 or bf16, any strides.
        state: the parameter's state tensors by name (leantune.codec.ternary_state).
        block_size: elements of a block.
        key: of the random bits of this parameter and step.
        first_row: index of row 0 in the whole parameter, where these are the rows of a shard.
        rule: the fields lr, decay, beta1, beta2, bias, eps, grad_scale as floats, stochastic as a bool.
    """

    def __init__(
        self,
        weight: Tensor,
        grad: Tensor,
        state: dict[str, Any],
        block_size: int,
        key: int,
        first_row: int = 0,
        **rule: float,
    ) -> None:
        self._weight, self._state = weight, state
        beta1, beta2 = rule["beta1"], rule["beta2"]
        suffixes = ("", "_2") if "momentum_trits_2" in state else ("",)
        self._keep: list[Tensor] = []
        self._call = call = _Call(
            rows=weight.shape[0],
            cols=weight.shape[1],
            first_row=first_row,
            grad_row=grad.stride(0),
            grad_column=grad.stride(1),
            blocks_per_row=state["variance_level"].shape[1],
            bytes_per_row=state["variance_trits"].shape[1],
            key=key,
            block=block_size,
            planes=len(suffixes),
            rank=state["carry_rows"].shape[1] if "carry_rows" in state else 0,
            grad_dtype=_DTYPES[grad.dtype],
            weight_dtype=_DTYPES[weight.dtype],
            threads=torch.get_num_threads(),
            rest1=1 - beta1,
            release=1 / (1 - beta1),
            rest2=1 - beta2,
            grad=grad.data_ptr(),
            weight=weight.data_ptr(),
            remainder=state["weight_remainder"].data_ptr() if "weight_remainder" in state else None,
            variance_trits=state["variance_trits"].data_ptr(),
            variance_level=state["variance_level"].data_ptr(),
            variance_step=state["variance_step"].data_ptr(),
            **{name: int(value) if name == "stochastic" else value for name, value in rule.items()},
        )
        for plane, suffix in enumerate(suffixes):
            call.momentum_trits[plane] = state[f"momentum_trits{suffix}"].data_ptr()
            call.momentum_scale[plane] = state[f"momentum_scale{suffix}"].data_ptr()
        if call.rank:
            call.carry_rows, call.carry_columns = self._factors(state["carry_rows"], state["carry_columns"])

    def power_iteration(self, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(u V, u^T u V, (u V)^T u V) for this step's u: fp32 (rows, rank), fp32 (cols, rank), fp64 (rank, rank).

        ``basis``: V, fp32 (cols, rank). The sums run over fixed ranges of rows, whatever the number of threads.
        """
        rows, cols, rank = self._call.rows, self._call.cols, self._call.rank
        chunks = self._chunks(rank)
        # dtype and device are named: the user may have set other defaults.
        padded = torch.zeros((rank, -(-cols // 16) * 16), dtype=torch.float32, device="cpu")
        padded[:, :cols] = basis.t()
        product = torch.empty((rows, rank), dtype=torch.float32, device="cpu")
        columns = torch.zeros((chunks, rank, cols), dtype=torch.float32, device="cpu")
        gram = torch.zeros((chunks, rank, rank), dtype=torch.float64, device="cpu")
        _load()[0].leantune_ternary_momentum(
            ctypes.byref(self._call), padded.data_ptr(), product.data_ptr(), columns.data_ptr(), gram.data_ptr(), chunks
        )
        return product, columns.sum(0).t(), gram.sum(0)

    def decode_with(self, factors: Factors) -> None:
        """The factors that the stored second moment is relative to; needed before the other calls."""
        self._keep += [factors.rows, factors.columns]
        self._call.row_factors, self._call.column_factors = factors.rows.data_ptr(), factors.columns.data_ptr()

    def square_sums(self) -> tuple[Tensor, Tensor]:
        """Sums of g^2 over the columns, fp32 (rows,), and over these rows, fp64 (cols,)."""
        rows, cols, chunks = self._call.rows, self._call.cols, self._chunks(2)
        row_sums = torch.empty(rows, dtype=torch.float32, device="cpu")
        column_sums = torch.zeros((chunks, cols), dtype=torch.float64, device="cpu")
        _load()[0].leantune_ternary_squares(
            ctypes.byref(self._call), row_sums.data_ptr(), column_sums.data_ptr(), chunks
        )
        return row_sums, column_sums.sum(0)

    def _chunks(self, rank: int) -> int:
        """Fixed ranges of rows whose sums over columns are kept apart, fp32 (rank, cols) each."""
        return max(1, min(MAX_CHUNKS, CHUNK_BYTES // max(1, 4 * rank * self._call.cols), self._call.rows))

    def step(self, carry: tuple[Tensor, Tensor] | None, factors: Factors) -> None:
        """Decode, rule, encode against the refreshed ``carry`` (bf16 U and V) and ``factors``, move the weights."""
        self._keep += [factors.rows, factors.columns]
        self._call.new_row_factors = factors.rows.data_ptr()
        self._call.new_column_factors = factors.columns.data_ptr()
        if carry is not None:
            self._call.new_rows, self._call.new_columns = self._factors(*carry)
        _load()[0].leantune_ternary_step(ctypes.byref(self._call))
        written = [self._weight, *(value for name, value in self._state.items() if name != "step")]
        torch.autograd.graph.increment_version(written)

    def _factors(self, rows: Tensor, columns: Tensor) -> tuple[int, int]:
        """Pointers to U as stored and V^T in fp32."""
        self._keep += [rows.contiguous(), columns.t().float().contiguous()]
        return self._keep[-2].data_ptr(), self._keep[-1].data_ptr()
