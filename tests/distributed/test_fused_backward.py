"""FusedBackward on replicas and on shards: two and four gloo processes, started by torchrun."""

import subprocess
import sys
from pathlib import Path

import pytest

CASES = [
    "equal_to_one_process",
    "fifty_steps",
    "accumulation",
    "wrapped_in_ddp",
    "fully_sharded",
    "offloaded_and_rounded_sums",
    "what_is_refused",
]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_g4_g15_o10_processes_train_as_one(processes: int) -> None:
    script = Path(__file__).with_name("fused_backward.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run([*command, str(script), *CASES], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert [line.removeprefix("done: ") for line in done.stdout.splitlines() if line.startswith("done: ")] == CASES
