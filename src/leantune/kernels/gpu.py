"""The CUDA kernels of TernaryAdamW (triton_ternary.py): when they are chosen, and how a step launches them.

Triton comes with CUDA builds of torch. Where it is missing, or for what the kernels do not take, the rule in plain
torch runs instead, with the same decisions; :func:`status` says which and why. A matrix without a carry is one launch,
one with a carry three: two halves of the power iteration, which need all of W = u V between them, and the step. Sums
that cross rows run over fixed ranges of rows and columns in a fixed order, so a step gives the same bits every time.
"""

import contextlib
import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from leantune.codec.factored import Factors
from leantune.kernels import native

MAX_RANK = 16
BLOCK_SIZES = (16, 32, 64, 128, 256)
PARTIAL_BYTES = 2 << 20
"""Bound on the partial sums of each half of the power iteration, fp32."""
PROGRAMS = 1024
"""Programs that each half of the power iteration is cut into, where its partial sums allow."""
_STEP_TILE, _MOMENTUM_TILE = 1024, 2048
"""Elements of a program's tile; a power of two."""
_INTERPRETED_TILE = 1 << 15
_LEAST_EPS = 2.0**-62
"""Below this eps could not be told from the root of the smallest stored second moment, 2^-63, in any case."""
_DTYPES = (torch.float32, torch.bfloat16)
_OPTIONS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
"""How Triton compiles: without copies of a loop's body for prefetching, for which the kernels have no registers."""


@functools.cache
def _kernels() -> tuple[ModuleType | None, str]:
    """(the module of kernels or None, what to say about it)."""
    try:
        import triton

        from leantune.kernels import triton_ternary
    except ImportError as error:
        return None, f"Triton cannot be imported ({error}); the rule runs in plain torch"
    return triton_ternary, f"triton {triton.__version__}"


_on_cpu = False


def status() -> str:
    """What updates ternary states on a GPU: "triton 3.6.0", or the plain rule and why."""
    if not native.enabled():
        return "turned off; the rule runs in plain torch"
    return _kernels()[1]


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1 when they were first used)."""
    module = _kernels()[0]
    return module is not None and type(module.step_kernel).__name__ == "InterpretedFunction"


class on_cpu:
    """Within this context CPU tensors go through the kernels too, in Triton's interpreter: slow, for tests.

    Raises RuntimeError where Triton is missing, or was imported without TRITON_INTERPRET=1.
    """

    def __enter__(self) -> None:
        global _on_cpu
        if not interpreted():
            raise RuntimeError(
                f"the kernels cannot run on the CPU ({_kernels()[1]}): set TRITON_INTERPRET=1 in the environment "
                "before Triton is imported."
            )
        self._before, _on_cpu = _on_cpu, True

    def __exit__(self, *_: object) -> None:
        global _on_cpu
        _on_cpu = self._before


def takes(weight: Tensor, grad: Tensor, block_size: int, rank: int) -> bool:
    """Whether the kernels can update this parameter: on a GPU, fp32 or bf16, blocks of a power of two up to 256, a
    carry of rank 16 at most. float16 weights and gradients run in plain torch."""
    return (
        native.enabled()
        and weight.device == grad.device
        and weight.device.type == ("cpu" if _on_cpu else "cuda")
        and weight.dtype in _DTYPES
        and grad.dtype in _DTYPES
        and block_size in BLOCK_SIZES
        and rank <= MAX_RANK
        and _kernels()[0] is not None
    )


class TernaryCall:
    """One parameter in one step, as the kernels see it; the GPU's counterpart of ``native.TernaryCall``.

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
        self._weight, self._state, self._block = weight, state, block_size
        self._rows, self._cols = weight.shape
        self._rank = state["carry_rows"].shape[1] if "carry_rows" in state else 0
        self._key, self._first_row = key - (1 << 64) if key >> 63 else key, first_row
        beta1, beta2 = rule["beta1"], rule["beta2"]
        unit = grad.stride(1) == 1
        # Strides of 16 elements are what a 16-byte access of any dtype needs to know.
        aligned = unit and self._cols % 16 == 0 and grad.stride(0) % 16 == 0
        share = 16 if aligned else 1
        carry = self._factors(state["carry_rows"], state["carry_columns"]) if self._rank else (None, None)
        self._read = {
            "grad": grad,
            "momentum_trits": state["momentum_trits"],
            "momentum_scale": state["momentum_scale"],
            "momentum_trits_2": state.get("momentum_trits_2"),
            "momentum_scale_2": state.get("momentum_scale_2"),
            "variance_trits": state["variance_trits"],
            "variance_level": state["variance_level"],
            "variance_step": state["variance_step"],
            "carry_rows": carry[0],
            "carry_columns": carry[1],
            "rows": self._rows,
            "cols": self._cols // share,
            "grad_row": grad.stride(0) // share,
            "grad_column": grad.stride(1),
            "bytes_per_row": state["variance_trits"].shape[1],
            "blocks_per_row": state["variance_level"].shape[1],
            "rest1": 1 - beta1,
            "beta2": beta2,
            "rest2": 1 - beta2,
            "bias": rule["bias"],
            "eps": max(rule["eps"], _LEAST_EPS),
            "grad_scale": rule["grad_scale"],
            "BLOCK": block_size,
            "PLANES": 2 if "momentum_trits_2" in state else 1,
            "RANK": self._rank,
            "UNIT": unit,
            "ALIGNED": aligned,
            **_OPTIONS,
        }
        self._written = {
            "rate": rule["lr"] / (1 - beta1),
            "decay": rule["decay"],
            "beta1": beta1,
            "STOCHASTIC": bool(rule["stochastic"]),
            "REMAINDER": "weight_remainder" in state,
        }

    def power_iteration(self, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(u V, u^T u V, (u V)^T u V) for this step's u: fp32 (rows, rank), fp32 (cols, rank), fp64 (rank, rank).

        ``basis``: V, fp32 (cols, rank). At most `PARTIAL_BYTES` of partial sums live at a time.
        """
        kernels: Any = _kernels()[0]
        rows, cols, rank, blocks = self._rows, self._cols, self._rank, self._read["blocks_per_row"]
        height = max(16, (_INTERPRETED_TILE if _on_cpu else _MOMENTUM_TILE) // self._block)
        tiles = -(-rows // height)
        new = functools.partial(torch.empty, dtype=torch.float32, device=self._weight.device)
        each, splits = _shares(-(-blocks // 5), PROGRAMS // tiles, PARTIAL_BYTES // (4 * rank * rows))
        parts = new((splits, rows, rank))
        with _device(self._weight):
            kernels.product_kernel[(tiles, splits)](
                parts, basis.contiguous(), groups_each=each, ROWS=height, **self._read
            )
            product = parts[0] if splits == 1 else parts.sum(0)
            each, chunks = _shares(tiles, PROGRAMS // blocks, PARTIAL_BYTES // (4 * rank * cols))
            parts = new((chunks, cols, rank))
            kernels.columns_kernel[(blocks, chunks)](parts, product, tiles_each=each, ROWS=height, **self._read)
        return product, parts[0] if chunks == 1 else parts.sum(0), _gram(product)

    def decode_with(self, factors: Factors) -> None:
        """The factors that the stored second moment is relative to; needed before the other calls."""
        self._read |= {"row_factors": factors.rows, "column_factors": factors.columns}

    def square_sums(self) -> tuple[Tensor, Tensor]:
        """Sums of g^2 over the columns, fp32 (rows,), and over these rows, fp64 (cols,)."""
        grad, scale = self._read["grad"], self._read["grad_scale"] ** 2
        rows = torch.linalg.vector_norm(grad, dim=1, dtype=torch.float32).square_()
        columns = torch.linalg.vector_norm(grad, dim=0, dtype=torch.float64).square_()
        return rows.mul_(scale), columns.mul_(scale)

    def step(self, carry: tuple[Tensor, Tensor] | None, factors: Factors) -> None:
        """Decode, rule, encode against the refreshed ``carry`` (bf16 U and V) and ``factors``, move the weights."""
        kernels: Any = _kernels()[0]
        new_rows, new_columns = self._factors(*carry) if carry is not None else (None, None)
        height = max(1, (_INTERPRETED_TILE if _on_cpu else _STEP_TILE) // self._block)
        programs = -(-self._rows // height) * -(-self._read["blocks_per_row"] // 5)
        with _device(self._weight):
            kernels.step_kernel[(programs,)](
                weight=self._weight,
                remainder=self._state.get("weight_remainder"),
                new_rows=new_rows,
                new_columns=new_columns,
                new_row_factors=factors.rows,
                new_column_factors=factors.columns,
                key=self._key,
                first_row=self._first_row,
                ROWS=height,
                **self._read,
                **self._written,
            )
        written = [self._weight, *(value for name, value in self._state.items() if name != "step")]
        torch.autograd.graph.increment_version(written)

    def _factors(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """U as stored and V^T, both bf16."""
        return rows.contiguous(), columns.t().contiguous()


def _shares(items: int, wanted: int, allowed: int) -> tuple[int, int]:
    """(items each, shares): about ``wanted`` equal shares of ``items``, at most ``allowed`` of them, one at least."""
    each = -(-items // max(1, min(items, wanted, allowed)))
    return each, -(-items // each)


def _gram(product: Tensor) -> Tensor:
    """W^T W in fp64 (rank, rank), from fp32 W (rows, rank), with bounded temporaries."""
    wide = (part.double() for part in product.split(max(1, PARTIAL_BYTES // (8 * product.shape[1]))))
    total = product.new_zeros((product.shape[1],) * 2, dtype=torch.float64)
    for part in wide:
        total += part.t() @ part
    return total


def _device(weight: Tensor) -> Any:
    """The context in which Triton launches on the weight's device."""
    return torch.cuda.device(weight.device) if weight.device.type == "cuda" else contextlib.nullcontext()
