"""The GPU check is rehearsed on the CPU, so that the one run it gets on a GPU is not its first."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path[1:]])}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("part", ["fused", "loss", "velora", "checkpoints", "memory"])
def test_a_case_of_each_part_about_models_passes(part: str, monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu_check_models
    from gpu_check_machine import Machine

    case = next(iter(getattr(gpu_check_models, part)(Machine(torch.device("cpu"), small=True))))
    good, figures = case.run()
    assert good and json.loads(json.dumps(figures)) == figures


@pytest.mark.slow
def test_the_whole_rehearsal_passes(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    path = tmp_path / "rows.csv"
    done = check("--rehearse", "--seconds", "500", "--rows", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    written = rows(path)
    assert len({row["part"] for row in written}) == 9
    assert all(row["ok"] == "yes" and row["device"] and row["triton"] for row in written)


@pytest.mark.slow
def test_what_there_is_no_time_for_is_written_as_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    done = check("--rehearse", "--seconds", "0", "--parts", "velora", "memory", "--rows", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["ok"] for row in rows(path)} == {"skipped"}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
def test_without_a_gpu_it_says_so_and_exits_2() -> None:
    done = check()
    assert done.returncode == 2
    assert "needs a CUDA GPU" in done.stdout
