"""Cases that several gloo processes run together: how a test starts them, and how a process goes through them."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def torchrun(script: Path, processes: int, *arguments: str) -> list[str]:
    """The cases that every process came through, in order."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run([*command, str(script), *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [line.removeprefix("done: ") for line in done.stdout.splitlines() if line.startswith("done: ")]


def run_cases(
    cases: Mapping[str, Any], names: Sequence[str], arguments: Callable[[], tuple[Any, ...]] = lambda: ()
) -> None:
    """What a process does; ``arguments`` makes each case's, once the processes know each other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    given = arguments()
    for name in names:
        cases[name](*given)
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"done: {name}", flush=True)
    dist.destroy_process_group()
