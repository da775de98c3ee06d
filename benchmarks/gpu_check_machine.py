"""What the parts of gpu_check run on: a CUDA GPU, or the CPU at tiny sizes where the script is rehearsed."""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from leantune.kernels import gpu


@dataclass
class Case:
    """One row: ``run`` returns (whether it is as it should be, figures)."""

    name: str
    run: Callable[[], tuple[bool, dict[str, Any]]]
    goal: str = ""


@dataclass
class Machine:
    """``small``: sizes of a rehearsal."""

    device: torch.device
    small: bool

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.cuda else "cpu (rehearsal)"

    def kernels(self) -> contextlib.AbstractContextManager[Any]:
        """Within it the Triton kernels run: always on a GPU, in the interpreter on a CPU."""
        return contextlib.nullcontext() if self.cuda else gpu.on_cpu()

    @contextlib.contextmanager
    def fixed_order(self) -> Iterator[None]:
        """Within it torch's own sums run in a fixed order, where they can; without filling fresh memory with NaN."""
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    def synchronise(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, function: Callable[[], Any]) -> float:
        """Wall-clock seconds of one call, to the end of its work on the device."""
        self.synchronise()
        began = time.perf_counter()
        function()
        self.synchronise()
        return time.perf_counter() - began

    def median_seconds(self, function: Callable[[], Any], rounds: int) -> float:
        """Median of ``rounds`` calls after one that is not counted."""
        return statistics.median([self.seconds(function) for _ in range(rounds + 1)][1:])

    def peak_bytes(self, function: Callable[[], Any]) -> tuple[int, int]:
        """(bytes allocated before, most bytes allocated while) ``function`` ran; zeros on a CPU."""
        if not self.cuda:
            function()
            return 0, 0
        gc.collect()
        self.synchronise()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        function()
        self.synchronise()
        return before, torch.cuda.max_memory_allocated(self.device)
