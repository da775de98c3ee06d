"""The CUDA kernels of TernaryAdamW (triton_ternary.py): when they are chosen, and how a step launches them.

Triton comes with CUDA builds of torch. Where it is missing, or for what the kernels do not take, the rule in plain
torch runs instead, with the same decisions; :func:`status` says which and why. After the sums of squares, a matrix
without a carry is one launch, one with a carry two: W = u V, and the step; where V is worked out anew, a third between
them: u^T W, which needs all of W. Sums run
over fixed ranges of rows and columns in a fixed order, so a step gives the same bits every time.
"""

import contextlib
import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from leantune.codec.column_factors import ColumnFactors
from leantune.codec.low_rank import next_basis
from leantune.kernels import native

MAX_RANK = 16
BLOCK_SIZES = (16, 32, 64, 128, 256)
PARTIAL_BYTES = 2 << 20
"""Bound on the partial sums of each launch that sums over rows or columns."""
PROGRAMS = 1024
"""Programs that such a launch is cut into, where its partial sums allow."""
_STEP_TILE, _MOMENTUM_TILE, _SQUARES_TILE = 1024, 2048, 2048
"""Elements of a program's tile; a power of two."""
_SQUARES_WIDTH = 128
"""Columns of a tile of squares."""
_INTERPRETED_TILE = 1 << 15
_LEAST_EPS = 2.0**-62
"""The kernels' inverse starts here. Gradients as small have squares that fp32 does not hold well, in any case."""
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


def takes(weight: Tensor, grad: Any, block_size: int, rank: int) -> bool:
    """Whether the kernels can update this parameter: on a GPU, fp32 or bf16, blocks of a power of two up to 256, a
    carry of rank 16 at most. float16 weights and gradients run in plain torch. ``grad``: a tensor, or what has a
    tensor's dtype and device."""
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
        state: the parameter's state tensors by name (leantune.codec.ternary_state). Those that belong to the columns
            are read, and written by the caller after :meth:`step`.
        block_size: elements of a block.
        key: of the random bits of this parameter and step.
        first_row: index of row 0 in the whole parameter, where these are the rows of a shard.
        rule: the fields lr, decay, beta1, beta2, bias, eps, grad_scale as floats; stochastic, refresh and sampled as
            bools.
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
        self._refresh = bool(rule["refresh"])
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
            "times": ColumnFactors(state["variance_columns"]).times,
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
            "sampled": float(rule["sampled"]),
            "beta1": beta1,
            "STOCHASTIC": bool(rule["stochastic"]),
            "REMAINDER": "weight_remainder" in state,
        }

    next_basis = staticmethod(next_basis)

    def square_sums(self) -> Tensor:
        """Sums of g^2 over these rows, fp64 (cols,)."""
        height = (_INTERPRETED_TILE if _on_cpu else _SQUARES_TILE) // _SQUARES_WIDTH
        strips, tiles = -(-self._cols // _SQUARES_WIDTH), -(-self._rows // height)
        each, chunks = _shares(tiles, PROGRAMS // strips, PARTIAL_BYTES // (8 * self._cols))
        parts = torch.empty((chunks, self._cols), dtype=torch.float64, device=self._weight.device)
        names = ("grad", "rows", "cols", "grad_row", "grad_column", "grad_scale", "UNIT", "ALIGNED", *_OPTIONS)
        settings = {name: self._read[name] for name in names}
        kernels: Any = _kernels()[0]
        with _device(self._weight):
            kernels.squares_kernel[(strips, chunks)](
                parts, tiles_each=each, WIDTH=_SQUARES_WIDTH, ROWS=height, **settings
            )
        return _sum(parts)

    def step(self, means: Tensor, basis: Tensor | None) -> Tensor | None:
        """Decode, rule, encode, move the weights; with ``refresh`` gives Y = u^T u V of these rows, fp32 (cols, rank).

        ``means``: c, fp32 (cols,), that the second moment is coded relative to from now on. ``basis``: V, bf16 (cols,
        rank), that u is projected onto and coded against. Without a carry it is None, and Y too.
        """
        carry, products = None, None
        if basis is not None:
            product, products = self._products(basis)
            carry = self._factors(product.to(torch.bfloat16), basis)
        height = max(1, (_INTERPRETED_TILE if _on_cpu else _STEP_TILE) // self._block)
        programs = -(-self._rows // height) * -(-self._read["blocks_per_row"] // 5)
        kernels: Any = _kernels()[0]
        with _device(self._weight):
            kernels.step_kernel[(programs,)](
                weight=self._weight,
                remainder=self._state.get("weight_remainder"),
                new_rows=carry and carry[0],
                new_columns=carry and carry[1],
                over=ColumnFactors(means).over,
                key=self._key,
                first_row=self._first_row,
                ROWS=height,
                **self._read,
                **self._written,
            )
        if carry is not None:
            # Not in the kernel: every program of a row decodes with the old U.
            self._state["carry_rows"].copy_(carry[0])
        native.note_written(self._weight, self._state)
        return products

    def _products(self, basis: Tensor) -> tuple[Tensor, Tensor | None]:
        """(W = u V, u^T W) for this step's u: fp32 (rows, rank) and, with ``refresh``, (cols, rank). At most
        `PARTIAL_BYTES` of partial sums live at a time."""
        kernels: Any = _kernels()[0]
        rows, cols, rank, blocks = self._rows, self._cols, self._rank, self._read["blocks_per_row"]
        height = max(16, (_INTERPRETED_TILE if _on_cpu else _MOMENTUM_TILE) // self._block)
        tiles = -(-rows // height)
        new = functools.partial(torch.empty, dtype=torch.float32, device=self._weight.device)
        # A process may hold no rows of a matrix: its sums are 0.
        each, splits = _shares(-(-blocks // 5), PROGRAMS // max(1, tiles), PARTIAL_BYTES // max(1, 4 * rank * rows))
        parts = new((splits, rows, rank))
        with _device(self._weight):
            kernels.product_kernel[(tiles, splits)](
                parts, basis.contiguous(), groups_each=each, ROWS=height, **self._read
            )
            product = _sum(parts)
            if not self._refresh:
                return product, None
            each, chunks = _shares(tiles, PROGRAMS // blocks, PARTIAL_BYTES // (4 * rank * cols))
            parts = new((chunks, cols, rank))
            kernels.columns_kernel[(blocks, chunks)](parts, product, tiles_each=each, ROWS=height, **self._read)
        return product, _sum(parts)

    def _factors(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """U as stored and V^T, both bf16."""
        return rows.contiguous(), columns.t().contiguous()


def _shares(items: int, wanted: int, allowed: int) -> tuple[int, int]:
    """(items each, shares): about ``wanted`` equal shares of ``items``, at most ``allowed`` of them, one at least."""
    each = max(1, -(-items // max(1, min(items, wanted, allowed))))
    return each, max(1, -(-items // each))


def _sum(parts: Tensor) -> Tensor:
    """The sum over the first dimension."""
    return parts[0] if len(parts) == 1 else parts.sum(0)


def _device(weight: Tensor) -> Any:
    """The context in which Triton launches on the weight's device."""
    return torch.cuda.device(weight.device) if weight.device.type == "cuda" else contextlib.nullcontext()
