"""A run whose disk fills up, refuses, or that is killed, at every place where it writes: the last whole checkpoint is
left, a message says so, and going on ends with the same weights to the bit (traps P4, P12)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from training.tiny_runs import write_rows

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("full", {"optim": "ternary_adamw", "velora_target_modules": ["down_proj"]}),
        ("denied", {"method": "lora", "optim": "adamw"}),
        ("killed", {"optim": "ternary_adamw"}),
    ],
    ids=["disk full", "writes denied", "killed"],
)
def test_p4_p12_a_fault_at_any_write_loses_nothing(
    kind: str, more: dict, faulty_writes: Path, tiny_model_path: str, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path, 16)
    with Path(rows).open("a", encoding="utf-8") as file:
        file.write('{"text": ""}\n')  # left out, and written to dropped.jsonl
    before = {path: path.read_bytes() for path in [Path(rows), *Path(tiny_model_path).iterdir()]}
    keys = {
        "model_name_or_path": tiny_model_path, "dataset": rows, "max_length": 32, "max_steps": 4, "save_steps": 2,
        "per_device_train_batch_size": 4, "learning_rate": 1e-3, "save_total_limit": 1, "drop_invalid": True, **more,
    }  # fmt: skip
    asked = json.dumps({"keys": keys, "kinds": [kind], "most": 40})
    environment = os.environ | {
        "LD_PRELOAD": str(faulty_writes), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg",
    }  # fmt: skip
    command = [sys.executable, str(HERE / "faulty_runs.py"), str(tmp_path), asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert first["writes"] > 30 and len(found) >= 25
    for run in found:
        assert run["same"], run
        if kind == "killed":
            assert run["code"] == -9, run
        else:
            assert run["code"] in (2, 3), run
            reason = "No space left" if kind == "full" else "Permission denied"
            assert reason in run["said"] or "torch could not write" in run["said"], run
            assert "Traceback" not in run["said"]
            if "The model is trained and written" in run["said"]:
                assert run["finished"] and run["left"][-1] == "checkpoint-4", run
            elif run["left"]:
                assert run["left"][-1] in run["said"], run
    assert all(path.read_bytes() == content for path, content in before.items())
