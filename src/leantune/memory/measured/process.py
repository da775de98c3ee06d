"""Memory of this process as the operating system counts it (and of a CUDA device as its allocator does).

This is the outer measurement: it includes the interpreter, libraries, allocator slack and whatever C++ code allocates
for itself, none of which `MemoryTracker` can see.
"""

import ctypes
import os
import resource
import sys
from dataclasses import dataclass

import torch

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
_FULL = ("can't allocate memory", "not enough memory", "out of memory")
"""In the messages of torch's allocator for the CPU (Linux, Windows) and of CUDA's libraries."""


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes resident now, and at most since the last `reset_process_peak` (or since the process started)."""

    current: int
    peak: int
    source: str
    """Where the figures come from: "VmRSS, VmHWM", "ru_maxrss" or "torch.cuda allocator"."""


def process_peak(device: torch.device | str = "cpu") -> ProcessMemory:
    """Current and peak memory of this process: resident bytes for "cpu", the caching allocator's for a CUDA device.

    >>> memory = process_peak()
    >>> memory.peak >= memory.current > 0
    True
    """
    device = torch.device(device)
    if device.type == "cuda":
        return ProcessMemory(
            torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device), "torch.cuda allocator"
        )
    status = _proc_status()
    if status is not None:
        # The kernel keeps per-thread counts and may show a high-water mark a few pages under the current size.
        return ProcessMemory(status["VmRSS"], max(status["VmHWM"], status["VmRSS"]), "VmRSS, VmHWM")
    scale = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
    return ProcessMemory(peak, peak, "ru_maxrss")


def reset_process_peak(device: torch.device | str = "cpu") -> bool:
    """Start the peak again from what is in use now. Returns False where the system does not allow it (the peak then
    remains that of the whole process, and whoever prints it must say so).

    On Linux this writes 5 to /proc/self/clear_refs, which resets VmHWM of this process alone.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def return_freed_memory() -> bool:
    """Ask the C library to give freed heap pages back to the system (glibc's malloc_trim). False where it cannot."""
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (AttributeError, OSError, TypeError):
        return False


def return_large_frees(threshold: int = 1 << 20) -> bool:
    """Make the C library give freed blocks of ``threshold`` bytes or more back to the system at once (glibc's mallopt).

    glibc raises its mmap threshold to the size of each large block that is freed, up to 32 MiB: later blocks up to that
    size then come from the heap, and a freed one stays resident until everything above it is freed too. Fixing the
    threshold keeps the resident size equal to what tensors use; a large allocation then costs its page faults each
    time. Returns False where the C library has no mallopt.
    """
    try:
        library = ctypes.CDLL(None)
        return bool(library.mallopt(M_MMAP_THRESHOLD, threshold)) and bool(
            library.mallopt(M_TRIM_THRESHOLD, 2 * threshold)
        )
    except (AttributeError, OSError, TypeError):
        return False


def machine_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device or the machine had no memory left; torch raises three kinds.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes do not fit"))
    (True, False)
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _FULL)


def _proc_status() -> dict[str, int] | None:
    """VmRSS and VmHWM in bytes, from /proc/self/status; None where there is none (or it does not list them)."""
    found: dict[str, int] = {}
    try:
        with open("/proc/self/status") as file:
            for line in file:
                key, _, rest = line.partition(":")
                if key in ("VmRSS", "VmHWM"):
                    found[key] = int(rest.split()[0]) * 1024
    except OSError:
        return None
    return found if len(found) == 2 else None
