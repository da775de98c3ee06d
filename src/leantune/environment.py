"""What a bug report needs to know: versions, kernels, processor, memory, devices. Nothing missing is an error here."""

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "leantune", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "bitsandbytes",
    "lm_eval", "triton",
)  # fmt: skip
"""Those whose versions are told; read from their metadata, so that one that cannot be imported is told as well."""
MISSING = "not installed"
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "HF_HOME",
    "HF_HUB_OFFLINE",
)


def environment() -> dict[str, Any]:
    """Everything known of this machine, as plain values ready for JSON. Sizes in bytes.

    >>> sorted(environment())
    ['cores', 'cpu', 'cuda', 'gpus', 'kernels', 'packages', 'platform', 'python', 'ram', 'variables']
    """
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "kernels": _kernels(),
        "cpu": processor(),
        "cores": _cores(),
        "ram": _ram(),
        "cuda": _cuda(),
        "gpus": _gpus(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def version_of(package: str) -> str:
    """The installed version of a package, "not installed" where there is none.

    >>> version_of("no_such_package")
    'not installed'
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return MISSING
    except Exception as error:  # a half-removed package has metadata without a version
        return _reason(error)


def _kernels() -> dict[str, str]:
    """What updates ternary states on this machine's CPU and GPU."""
    try:
        from leantune.kernels import gpu, native

        return {"cpu": native.status(), "gpu": gpu.status()}
    except Exception as error:  # a broken torch is what such a report is for
        reason = _reason(error)
        return {"cpu": reason, "gpu": reason}


def processor() -> str:
    """The name of this machine's CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "Hardware")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> dict[str, int | None]:
    """Logical cores of the machine, and how many of them this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"logical": os.cpu_count(), "usable": usable}


def _ram() -> dict[str, int] | str:
    try:
        import psutil

        memory = psutil.virtual_memory()
        return {"total": memory.total, "available": memory.available}
    except Exception as error:
        return _reason(error)


def _cuda() -> dict[str, Any]:
    """torch's CUDA, the driver, and whether torch can use a device."""
    found: dict[str, Any] = {"driver": next(iter(_nvidia_smi("driver_version")), MISSING)}
    try:
        import torch

        found["torch"] = torch.version.cuda or "a build without CUDA"
        found["usable"] = torch.cuda.is_available()
    except Exception as error:
        found["torch"], found["usable"] = _reason(error), False
    return found


def _gpus() -> list[dict[str, Any]]:
    """Name and memory of each GPU: those torch can use, or else those the driver shows."""
    try:
        import torch

        if torch.cuda.is_available():
            return [_torch_gpu(torch.cuda.get_device_properties(i), i) for i in range(torch.cuda.device_count())]
    except Exception:  # `_cuda` says why torch cannot be used
        pass
    rows = (line.rsplit(", ", 1) for line in _nvidia_smi("name,memory.total"))
    return [{"name": name, "total": int(mebibytes) << 20} for name, mebibytes in rows if mebibytes.isdigit()]


def _torch_gpu(properties: Any, index: int) -> dict[str, Any]:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    capability = f"{properties.major}.{properties.minor}"
    return {"name": properties.name, "capability": capability, "total": total, "free": free}


def _nvidia_smi(query: str) -> list[str]:
    """One line a GPU of what ``nvidia-smi`` answers to a query; none where it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=2, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.splitlines()


def _reason(error: Exception) -> str:
    """Why something cannot be told, in a line."""
    return f"cannot be used: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
