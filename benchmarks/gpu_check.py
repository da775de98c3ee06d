"""Every CUDA path of leantune on one GPU, in one run of a few minutes: is it right, and how fast, in how many bytes?

    python benchmarks/gpu_check.py                       # one CUDA GPU; exit 0 if nothing failed, 1 otherwise
    python benchmarks/gpu_check.py --parts kernels speed
    python benchmarks/gpu_check.py --rehearse            # on any machine, tiny: checks this script, not the GPU

Each case adds a row to results/gpu_check.csv: part, case, ok (yes, no, error, skipped), the goal, figures as JSON, and
seconds. A case that fails does not stop the others; once ``--seconds`` have passed, what is left is written as skipped.
Exit 2: no CUDA GPU here.

Parts: compile (seconds of a first step), kernels (Triton against the plain rule), speed (step times, against the bytes
and against torch's fused AdamW), fused (backward, bit for bit), loss (without logits), velora, checkpoints (to the CPU
and back), memory (steps of a 1B model against its plan), tuning (tile sizes of the step kernel).
"""

import argparse
import gc
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

# Before Triton and cuBLAS start: a compilation that is really one, and sums in a fixed order.
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="gpu_check_triton_")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from gpu_check_machine import Case, Machine
from rows import ResultRows

from leantune.kernels import gpu

COLUMNS = ("part", "case", "ok", "goal", "figures", "seconds", "device", "triton")
PARTS = {
    "compile": "gpu_check_kernels",
    "kernels": "gpu_check_kernels",
    "speed": "gpu_check_kernels",
    "fused": "gpu_check_models",
    "loss": "gpu_check_models",
    "velora": "gpu_check_models",
    "checkpoints": "gpu_check_models",
    "memory": "gpu_check_models",
    "tuning": "gpu_check_kernels",
}
"""Part -> the module whose function of that name yields its cases. Imported one at a time: a module that cannot be
imported here fails its own parts."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=330, help="after these, remaining cases are skipped")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny, on the CPU, rows into a file that is thrown away"
    )
    parser.add_argument("--rows", default=None, help="another CSV file for the rows")
    arguments = parser.parse_args(argv)
    if not arguments.rehearse and not torch.cuda.is_available():
        print("gpu_check needs a CUDA GPU, and torch sees none here. --rehearse runs the script itself on the CPU.")
        return 2
    machine = Machine(torch.device("cpu" if arguments.rehearse else "cuda"), small=arguments.rehearse)
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.rows or (Path(folder) / "rehearsal.csv" if arguments.rehearse else None)
        counts = run(machine, arguments.parts, ResultRows("gpu_check", COLUMNS, path), arguments.seconds)
    print(", ".join(f"{number} {ok}" for ok, number in counts.items()))
    return 1 if counts.get("no") or counts.get("error") else 0


def run(machine: Machine, parts: list[str], rows: ResultRows, budget: float) -> dict[str, int]:
    """Run the parts within ``budget`` seconds; how many cases ended how."""
    print(f"{machine.name}, torch {torch.__version__}, {gpu.status()}", flush=True)
    began, counts = time.perf_counter(), dict[str, int]()
    for part in parts:
        for case in _cases(machine, part):
            started = time.perf_counter()
            if started - began > budget:
                ok, figures = "skipped", {"reason": f"{budget:g} s were over"}
            else:
                ok, figures = _one(machine, case)
            seconds = time.perf_counter() - started
            rows.append(
                seed=0,
                part=part,
                case=case.name,
                ok=ok,
                goal=case.goal,
                figures=json.dumps(figures),
                seconds=round(seconds, 2),
                device=machine.name,
                triton=gpu.status(),
            )
            counts[ok] = counts.get(ok, 0) + 1
            print(f"{ok:8} {part}: {case.name} ({seconds:.1f} s) {figures}", flush=True)
            if case.goal:
                print(f"{'':8} goal: {case.goal}", flush=True)
    return counts


def _cases(machine: Machine, part: str) -> Iterator[Case]:
    """The part's cases; a part that cannot even be set up is one case that fails."""
    try:
        yield from getattr(importlib.import_module(PARTS[part]), part)(machine)
    except Exception as error:
        reason = error

        def fail() -> tuple[bool, dict[str, object]]:
            raise reason

        yield Case("set-up", fail)


def _one(machine: Machine, case: Case) -> tuple[str, dict[str, object]]:
    try:
        good, figures = case.run()
        machine.synchronise()
        return "yes" if good else "no", figures
    except Exception as error:
        traceback.print_exc()
        return "error", {"error": f"{type(error).__name__}: {error}"[:500]}
    finally:
        gc.collect()
        if machine.cuda:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
