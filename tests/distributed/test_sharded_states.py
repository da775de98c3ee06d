"""Optimizer states under DDP, FSDP2 and DTensor, on two, three and four processes started by torchrun."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("sharded_states.py")


def torchrun(processes: int, folder: Path, *cases: str) -> list[str]:
    """The cases that every process came through, in order."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run([*command, str(SCRIPT), str(folder), *cases], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [line.removeprefix("done: ") for line in done.stdout.splitlines() if line.startswith("done: ")]


def test_o3_o4_o5_o6_o10_states_are_the_same_sharded_and_survive_another_number_of_processes(tmp_path: Path) -> None:
    (tmp_path / "processes").write_text("4")
    saving = ["same_as_one_process", "other_placements", "save_sharded", "load_sharded"]
    assert torchrun(4, tmp_path, *saving) == saving
    loading = ["same_as_one_process", "load_sharded", "never_stepped", "replicas_stay_equal"]
    assert torchrun(2, tmp_path, *loading) == loading


@pytest.mark.slow
def test_o4_1601_rows_on_three_processes(tmp_path: Path) -> None:
    (tmp_path / "processes").write_text("3")
    cases = ["same_as_one_process", "save_sharded", "load_sharded"]
    assert torchrun(3, tmp_path, *cases) == cases
