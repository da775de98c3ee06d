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

INTERFACE = 3
"""The version of native/ternary.h that this module mirrors."""
CHUNK_BYTES = 2 << 20
"""Bound on partial sums over rows: fp32 (chunks, rank, cols), or fp64 (chunks, cols)."""
CHUNK_ELEMENTS = 1 << 16
"""Elements of the parameter in a chunk, at least: enough to hide its start."""
MAX_CHUNKS = 64
_WRITTEN = {
    *("momentum_trits", "momentum_scale", "momentum_trits_2", "momentum_scale_2"),
    *("variance_trits", "variance_level", "variance_step", "carry_rows", "weight_remainder"),
}
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
        *((name, ctypes.c_void_p) for name in ("carry_rows", "carry_columns", "basis")),
        *((name, ctypes.c_void_p) for name in ("column_means", "new_column_means")),
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
    for function in (library.leantune_ternary_squares, library.leantune_ternary_step):
        function.argtypes, function.restype = [ctypes.POINTER(_Call), ctypes.c_void_p, ctypes.c_int], None
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
            release=beta1 / (1 - beta1),
            rest2=1 - beta2,
            grad=grad.data_ptr(),
            weight=weight.data_ptr(),
            remainder=state["weight_remainder"].data_ptr() if "weight_remainder" in state else None,
            variance_trits=state["variance_trits"].data_ptr(),
            variance_level=state["variance_level"].data_ptr(),
            variance_step=state["variance_step"].data_ptr(),
            column_means=state["variance_columns"].data_ptr(),
            **{name: int(value) if name == "stochastic" else value for name, value in rule.items()},
        )
        for plane, suffix in enumerate(suffixes):
            call.momentum_trits[plane] = state[f"momentum_trits{suffix}"].data_ptr()
            call.momentum_scale[plane] = state[f"momentum_scale{suffix}"].data_ptr()
        if call.rank:
            call.carry_rows, call.carry_columns = (state[f"carry_{name}"].data_ptr() for name in ("rows", "columns"))

    def square_sums(self) -> Tensor:
        """Sums over these rows of the squared gradient, fp64 (cols,)."""
        chunks = self._chunks(8 * self._call.cols)
        partial = torch.zeros((chunks, self._call.cols), dtype=torch.float64, device="cpu")
        _load()[0].leantune_ternary_squares(ctypes.byref(self._call), partial.data_ptr(), chunks)
        return partial[0]

    def step(self, means: Tensor, basis: Tensor | None) -> Tensor | None:
        """Decode, rule, encode, move the weights.

        ``means``: c that v is coded relative to, fp32 (cols,); ``basis``: V that u is projected onto, bfloat16 (cols,
        rank). Returns Y = u^T u V over these rows, fp32 (cols, rank), or None without a carry. What belongs to the
        columns is read from the state and left to the caller to write.
        """
        call, cols, rank = self._call, self._call.cols, self._call.rank
        call.new_column_means = means.data_ptr()
        call.basis = None if basis is None else basis.data_ptr()
        chunks = self._chunks(4 * rank * cols)
        # dtype and device are named: the user may have set other defaults.
        partial = torch.zeros((chunks, rank, cols), dtype=torch.float32, device="cpu")
        _load()[0].leantune_ternary_step(ctypes.byref(call), partial.data_ptr(), chunks)
        torch.autograd.graph.increment_version(
            [self._weight, *(self._state[name] for name in _WRITTEN & set(self._state))]
        )
        return None if basis is None else partial[0].t()

    def _chunks(self, size: int) -> int:
        """Fixed ranges of rows whose sums, ``size`` bytes each, are kept apart; whatever the number of threads."""
        elements = self._call.rows * self._call.cols
        most = min(MAX_CHUNKS, self._call.rows, CHUNK_BYTES // max(1, size))
        return max(1, min(most, elements // CHUNK_ELEMENTS))
