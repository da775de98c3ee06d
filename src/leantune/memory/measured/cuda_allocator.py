"""What the CUDA caching allocator says: the peak of a stage, and a snapshot of every block when memory runs out."""

from pathlib import Path
from typing import Any

import torch

HISTORY = 100_000
"""Allocations and frees that a snapshot remembers, with the stacks they came from."""


class CudaAllocator:
    """Follows one CUDA device's allocator. Nothing is recorded before `start` and after `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """Remember allocations from now on, so that a snapshot can say where they came from."""
        torch.cuda.memory._record_memory_history(max_entries=HISTORY)

    def stop(self) -> None:
        """Stop remembering."""
        torch.cuda.memory._record_memory_history(enabled=None)

    def figures(self) -> dict[str, Any]:
        """Bytes: allocated and reserved at most since the last reset, and what is lost to fragments now."""
        stats = torch.cuda.memory_stats(self._device)
        return {
            "allocated_peak": stats["allocated_bytes.all.peak"],
            "reserved_peak": stats["reserved_bytes.all.peak"],
            "inactive_split": stats["inactive_split_bytes.all.current"],
            "retries": stats["num_alloc_retries"],
        }

    def write_snapshot(self, path: Path) -> Path:
        """A file for https://docs.pytorch.org/memory_viz: every block, with the stack that allocated it."""
        torch.cuda.memory._dump_snapshot(str(path))
        return path
