"""The machine a measurement was made on, and who else uses its memory."""

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from leantune.environment import processor
from leantune.memory.measured.process import machine_memory

_PACKAGES = ("leantune", "torch", "transformers", "trl", "peft", "accelerate")


@dataclass(frozen=True)
class ProcessUse:
    """Another process and the bytes it holds on the device."""

    pid: int
    name: str
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def describe_machine(device: torch.device | str = "cpu") -> dict[str, Any]:
    """{"device", "name", "memory_bytes", "free_bytes", "cores", "system"} of the host, or of its GPU."""
    device = torch.device(device)
    host = {"cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_properties(device).name
        return {"device": "cuda", "name": name, "memory_bytes": total, "free_bytes": free, **host}
    free = min(psutil.virtual_memory().available, machine_memory())
    return {"device": device.type, "name": processor(), "memory_bytes": machine_memory(), "free_bytes": free, **host}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what memory a run takes."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def other_processes(device: torch.device | str = "cpu", limit: int = 5) -> list[ProcessUse]:
    """The processes beside this one that hold the most memory of the device, largest first.

    On a GPU by what nvidia-smi says (nothing where it is missing, or sees no processes from inside a container); on a
    CPU by resident bytes, as far as this user may look.
    """
    device = torch.device(device)
    found = _on_gpu(device) if device.type == "cuda" else _on_host()
    others = [use for use in found if use.pid != os.getpid()]
    return sorted(others, key=lambda use: -use.bytes)[:limit]


def _on_host() -> list[ProcessUse]:
    found = []
    for process in psutil.process_iter(["pid", "name", "memory_info"]):
        memory = process.info["memory_info"]
        if memory is not None and memory.rss:
            found.append(ProcessUse(process.info["pid"], process.info["name"] or "?", memory.rss))
    return found


def _on_gpu(device: torch.device) -> list[ProcessUse]:
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory,process_name", "--format=csv,noheader,nounits"]
    if uuid is not None:
        command.append(f"--id=GPU-{str(uuid).removeprefix('GPU-')}")
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in listed.splitlines():
        pid, _, rest = line.partition(",")
        mebibytes, _, name = rest.partition(",")
        if pid.strip().isdigit() and mebibytes.strip().isdigit():
            found.append(ProcessUse(int(pid), Path(name.strip()).name, int(mebibytes) << 20))
    return found
