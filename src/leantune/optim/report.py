"""What an optimizer keeps for each parameter, in bits and bytes, and why."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one state tensor."""


@dataclass(frozen=True)
class StateLayout:
    """The state tensors of one parameter: ``tensors`` maps a name to (shape, dtype); ``reason`` says why this
    storage. A tensor has the parameter's rows, and is sharded as they are, unless its name is in ``replicated``."""

    storage: str
    reason: str
    tensors: dict[str, Spec]
    replicated: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors (the step count, 8 bytes on the host, left out)."""
        total = 0
        for shape, dtype in self.tensors.values():
            count = 1
            for size in shape:
                count *= size
            total += count * dtype.itemsize
        return total


@dataclass(frozen=True)
class ParameterState:
    """One row of a report. ``state_bytes`` in bytes; ``bits_per_parameter`` counts the optimizer state alone."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: str
    bits_per_parameter: float
    state_bytes: int
    reason: str

    @classmethod
    def of(cls, name: str, param: Tensor, layout: StateLayout) -> "ParameterState":
        """The row of a parameter whose state has this layout."""
        nbytes = layout.nbytes
        bits = 8 * nbytes / param.numel() if param.numel() else 0.0
        return cls(name, tuple(param.shape), param.dtype, layout.storage, bits, nbytes, layout.reason)


@dataclass(frozen=True)
class StateReport:
    """Every parameter of an optimizer with its storage. ``str(report)`` is a table with parameters of one kind summed
    up."""

    optimizer: str
    rows: list[ParameterState]

    @property
    def state_bytes(self) -> int:
        """Bytes of all state tensors."""
        return sum(row.state_bytes for row in self.rows)

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(_count(row.shape) for row in self.rows)

    def __str__(self) -> str:
        kinds: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        elements: Counter[tuple[str, str]] = Counter()
        for row in self.rows:
            kind = (row.storage, row.reason)
            kinds[kind] += 1
            sizes[kind] += row.state_bytes
            elements[kind] += _count(row.shape)
        lines = [f"{self.optimizer}: {self.state_bytes:,} bytes of state for {self.parameters:,} parameters"]
        for kind, number in kinds.most_common():
            per = sizes[kind] / elements[kind] if elements[kind] else 0.0
            lines.append(
                f"  {kind[0]:<12} {number:>5} tensors {elements[kind]:>15,} parameters {per:7.3f} B/param  {kind[1]}"
            )
        return "\n".join(lines)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
