"""leantune env: what a bug report should hold."""

import json
from collections.abc import Iterator
from typing import Any

import typer

EXAMPLES = """Examples:

leantune env

leantune env --json > environment.json
"""


def env(
    as_json: bool = typer.Option(False, "--json", help="JSON instead of a table; sizes in bytes."),
) -> None:
    """Versions, kernels, processor, memory and GPUs of this machine; what is missing is said to be missing."""
    from leantune.environment import environment

    found = environment()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for name, value in lines(found):
        typer.echo(f"{name:<22} {value}")


def lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(what, value) of each line, ready to be pasted into an issue."""
    yield "python", found["python"]
    yield "platform", found["platform"]
    yield from found["packages"].items()
    yield "CPU kernel", found["kernels"]["cpu"]
    yield "GPU kernel", found["kernels"]["gpu"]
    yield "CPU", found["cpu"]
    yield "cores", f"{found['cores']['usable']} of {found['cores']['logical']} usable"
    yield "RAM", _sizes(found["ram"])
    yield "CUDA of torch", found["cuda"]["torch"]
    yield "NVIDIA driver", found["cuda"]["driver"]
    for number, gpu in enumerate(found["gpus"]):
        capability = f", capability {gpu['capability']}" if "capability" in gpu else ""
        yield f"GPU {number}", f"{gpu['name']}{capability}, {_sizes(gpu)}"
    if not found["gpus"]:
        yield "GPU", "none"
    yield from found["variables"].items()


def _sizes(memory: dict[str, Any] | str) -> str:
    """Total and free memory as a reader writes it; a reason is passed on as it is."""
    if isinstance(memory, str):
        return memory
    names = {"total": "", "available": " available", "free": " free"}
    return ", ".join(f"{memory[key] / 2**30:.1f} GiB{word}" for key, word in names.items() if key in memory)
