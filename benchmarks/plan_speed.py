"""How long ``leantune plan`` takes as a command, interpreter and imports included, for models that are only described.

    python benchmarks/plan_speed.py

Each row is the median of several runs of one command: seconds on the wall and of CPU time. The models are config.json
files alone.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rows import ResultRows

COLUMNS = ("model", "command", "runs", "wall_seconds", "cpu_seconds")
LLAMA = {"model_type": "llama", "tie_word_embeddings": False, "max_position_embeddings": 8192}
MODELS: dict[str, dict[str, Any]] = {
    "8B": {
        "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128_256,
    },
    "65B": {
        "hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 22016, "num_attention_heads": 64,
        "num_key_value_heads": 64, "vocab_size": 32_000,
    },
}  # fmt: skip
COMMANDS = {
    "advice and maxima": ["--method", "full", "--gradient_checkpointing", "--per_device_train_batch_size", "1"],
    "method: auto": [],
}


def measure(model: dict[str, Any], given: list[str], runs: int) -> dict[str, Any]:
    """Median seconds of ``leantune plan`` with a budget of 24 GiB at 2,048 tokens."""
    wall, cpu = [], []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA | model))
        plan = ["plan", "--model_name_or_path", folder, "--max_length", "2048", "--memory_budget", "24GiB", *given]
        for _ in range(runs):
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            ended = subprocess.run(
                [sys.executable, "-c", "from leantune.cli import main; main()", *plan],
                capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            wall.append(time.perf_counter() - began)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            if ended.returncode not in (0, 3):
                raise RuntimeError(ended.stderr.decode())
    return {"runs": runs, "wall_seconds": statistics.median(wall), "cpu_seconds": statistics.median(cpu)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=None, help="CSV file of the rows; for rehearsals")
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    rows = ResultRows("plan_speed", COLUMNS, options.rows)
    for name, model in MODELS.items():
        for command, given in COMMANDS.items():
            row = rows.append(seed=0, model=name, command=command, **measure(model, given, options.runs))
            print(f"{name}, {command}: {row['wall_seconds']} s on the wall, {row['cpu_seconds']} s of CPU", flush=True)


if __name__ == "__main__":
    main()
