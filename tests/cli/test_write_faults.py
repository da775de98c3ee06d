"""Commands beside train whose disk fills up, refuses, or that are killed, at every place where they write."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from training.saved_adapters import saved_adapter
from training.tiny_runs import write_rows

COMMANDS = {
    "validate": (1, "validate {rows} --model_name_or_path {model} --drop_invalid --output_dir {out}"),
    "eval": (0, "eval {model} --dataset {rows} --drop_invalid --max_length 32 --output_file {out}/eval.json"),
    "merge": (0, "merge {adapter} --output_dir {out} --dtype float32"),
    "profile": (0, "profile --model_name_or_path {model} --dataset {rows} --drop_invalid --max_length 32 "
                   "--per_device_train_batch_size 4 --output_dir {out}"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_p12_a_fault_at_any_write_of_a_command_is_told_and_nothing_half_written_stands(
    name: str, faulty_writes: Path, tiny_model_path: str, tmp_path: Path
) -> None:
    expected, command = COMMANDS[name]
    rows, adapter = write_rows(tmp_path, 12), saved_adapter(tiny_model_path, tmp_path / "adapter")
    with Path(rows).open("a", encoding="utf-8") as file:
        file.write('{"text": ""}\n')
    own = [Path(rows), *Path(tiny_model_path).iterdir(), *Path(adapter).iterdir()]
    before = {path: path.read_bytes() for path in own if path.is_file()}
    words = [word.format(rows=rows, model=tiny_model_path, adapter=adapter, out="{out}") for word in command.split()]
    asked = json.dumps({"command": words, "kinds": ["full", "denied", "killed"], "most": 8})
    script = Path(__file__).with_name("faulty_commands.py")
    environment = os.environ | {
        "LD_PRELOAD": str(faulty_writes), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg",
    }  # fmt: skip
    given = [sys.executable, str(script), str(tmp_path), asked]
    done = subprocess.run(given, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert first["code"] == expected and first["writes"] >= 2 and len(found) >= 6, first
    for run in found:
        assert run["again"] == expected and run["files"] == first["files"], run
        if run["kind"] == "killed":
            assert run["code"] == -9, run
        else:
            assert run["code"] == 3, run
            last = run["said"].strip().splitlines()[-1]
            assert last.startswith("leantune: ") and "Traceback" not in run["said"], run
            reason = "No space left" if run["kind"] == "full" else "Permission denied"
            assert reason in last or "torch could not write" in last, run
            assert not [path for path in run["left"] if ".writing" in path], run
    assert all(path.read_bytes() == content for path, content in before.items())
