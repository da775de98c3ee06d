"""One memory limit: TRL with AdamW fails under it, and leantune finishes with the loss AdamW reaches without it.

    python benchmarks/same_cap.py --data FOLDER [--cap 1.75GiB] [--steps 20] [--threads 2]
    python benchmarks/same_cap.py --summary

SmolLM2-135M (the folder that ``leantune demo`` keeps), all weights, answers of GSM8K, rows of at most 256 tokens, 8 a
step, every block recomputed on all sides; FOLDER holds gsm8k_train_2000.jsonl. Each run is a process of its own. The
limit is the operating system's (RLIMIT_DATA: private writable memory, interpreter and libraries included), set before
torch is imported; what exceeds it cannot be allocated, as on a full GPU.
  trl-fp32, trl-bf16   SFTTrainer with adamw_torch, weights in fp32 or bf16
  leantune             leantune train: ternary states, fused backward, exact savings, bf16 weights
Without the limit each side is run at rates that are factors of 2 apart, until its best held-out loss is interior; then
each is run under the limit at that rate. A row of results/same_cap.csv a run: what came of it, the held-out loss (over
tokens, the same rows), the peak of resident memory.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rows import ResultRows

LENGTH, BATCH, HELD_OUT = 256, 8, 0.02
FIRST_POWER, MOST_RATES = -5, 6
"""The search starts at 1e-3 * 2^FIRST_POWER."""
SIDES = ("trl-fp32", "trl-bf16", "leantune")
PLAIN_MALLOC = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1"}
"""Of every run: pyarrow's own pool reserves 1 GiB of address space, which the limit would count."""
COLUMNS = (
    "side", "cap_bytes", "lr", "steps", "batch", "length", "threads", "outcome", "held_out_loss", "peak_rss_bytes",
    "seconds",
)  # fmt: skip
"""``cap_bytes``: 0 without a limit. ``outcome``: "finished", or the last words of the process."""


# -- in the process that trains ---------------------------------------------------------------------------------------


def child(side: str, cap: int, lr: float, steps: int, threads: int, data: Path, report: Path) -> None:
    """Train under ``cap`` bytes (0: no limit) and write what came of it."""
    if cap:
        resource.setrlimit(resource.RLIMIT_DATA, (cap, cap))
    import torch

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        loss = (_leantune if side == "leantune" else _trl)(side, lr, steps, data, Path(folder))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report.write_text(json.dumps({"held_out_loss": loss, "peak_rss_bytes": peak}), encoding="utf-8")


def _config(lr: float, steps: int, data: Path, folder: Path) -> Any:
    from leantune.training.config import build_config
    from leantune.training.demo_model import demo_model_path

    return build_config(
        {
            "model_name_or_path": str(demo_model_path()),
            "dataset": str(data / "gsm8k_train_2000.jsonl"),
            "output_dir": str(folder / "out"),
            "max_length": LENGTH,
            "eval_split": HELD_OUT,
            "learning_rate": lr,
            "lr_scheduler_type": "linear",
            "warmup_steps": max(1, steps // 10),
            "per_device_train_batch_size": BATCH,
            "max_steps": steps,
            "logging_steps": 10,
            "save_strategy": "no",
            "gradient_checkpointing": True,
        }
    )


def _leantune(side: str, lr: float, steps: int, data: Path, folder: Path) -> float:
    from leantune.training.run import train

    loss = train(_config(lr, steps, data, folder)).held_out_after
    assert loss is not None
    return loss


def _trl(side: str, lr: float, steps: int, data: Path, folder: Path) -> float:
    """The same rows and schedule through TRL's trainer; its own model is judged, row by row."""
    import torch
    from transformers import AutoModelForCausalLM, set_seed
    from trl import SFTConfig, SFTTrainer

    from leantune.training.run import load_rows

    config, tokenizer, rows = load_rows(_config(lr, steps, data, folder))
    set_seed(config.seed)
    dtype = torch.float32 if side == "trl-fp32" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(config.model_name_or_path, dtype=dtype)
    arguments = SFTConfig(
        output_dir=config.output_dir,
        learning_rate=lr,
        lr_scheduler_type="linear",
        warmup_steps=max(1, steps // 10),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        max_length=None,
        max_grad_norm=1.0,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        seed=config.seed,
        data_seed=config.seed,
        bf16=False,
        gradient_checkpointing=True,
        optim="adamw_torch",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=rows.train, processing_class=tokenizer)
    trainer.train()
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows.held_out:
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
            losses = torch.nn.functional.cross_entropy(
                model(input_ids=ids).logits[0, :-1].float(), labels[0, 1:], ignore_index=-100, reduction="sum"
            )
            total, count = total + losses.item(), count + int((labels[0, 1:] != -100).sum())
    return total / count


# -- in the process that asks -----------------------------------------------------------------------------------------


class Runs:
    """Runs by side, cap and rate, each looked up before it is made."""

    def __init__(self, rows: ResultRows, data: Path, steps: int, threads: int) -> None:
        self.rows, self.data, self.steps, self.threads = rows, data, steps, threads

    def run(self, side: str, cap: int, lr: float) -> dict[str, str]:
        key = {"side": side, "cap_bytes": cap, "lr": lr, "steps": self.steps}
        if found := self.rows.find(**key):
            return found[0]
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            said = {"cap": cap, "lr": lr, "steps": self.steps, "threads": self.threads, "report": report}
            options = [text for name, value in said.items() for text in (f"--{name}", str(value))]
            command = [sys.executable, __file__, "--data", str(self.data), "--child", side, *options]
            start = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **PLAIN_MALLOC})
            seconds = time.perf_counter() - start
            result = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
        outcome = "finished" if result else _last_words(done.stderr or f"ended by {done.returncode}")
        row = self.rows.append(
            seed=42, **key, batch=BATCH, length=LENGTH, threads=self.threads, outcome=outcome, seconds=seconds, **result
        )
        print(f"{side:9} cap {cap:>11,} lr {lr:.2e}: {outcome} {row['held_out_loss']} {seconds:.0f} s", flush=True)
        return row

    def loss(self, side: str, power: int) -> float:
        return float(self.run(side, 0, 1e-3 * 2.0**power)["held_out_loss"] or "inf")

    def best_rate(self, side: str) -> float:
        """Without the limit, the rate whose neighbours are both worse."""
        place = FIRST_POWER
        for _ in range(MOST_RATES):
            best = min((place - 1, place, place + 1), key=lambda power: self.loss(side, power))
            if best == place:
                break
            place = best
        return 1e-3 * 2.0**place


def _last_words(text: str) -> str:
    """The line of the error that ended a process."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "allocate" in line]
    return (errors or lines or ["no words"])[-1][:160]


def summarise(rows: ResultRows) -> None:
    for row in rows.read():
        cap = f"{int(row['cap_bytes']) / 2**30:.2f} GiB" if int(row["cap_bytes"]) else "none"
        peak = f"{int(row['peak_rss_bytes']) / 2**30:.2f} GiB" if row["peak_rss_bytes"] else ""
        loss = f"{float(row['held_out_loss']):.4f}" if row["held_out_loss"] else ""
        print(f"{row['side']:9} limit {cap:9} lr {float(row['lr']):.2e} loss {loss:7} peak {peak:9} {row['outcome']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with gsm8k_train_2000.jsonl")
    parser.add_argument("--cap", default="1.75GiB", help="the limit")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--rows", type=Path, help="another CSV file, for rehearsals")
    parser.add_argument("--summary", action="store_true", help="print the rows and stop")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--lr", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        cap = int(arguments.cap)
        child(arguments.child, cap, arguments.lr, arguments.steps, arguments.threads, arguments.data, arguments.report)
        return
    rows = ResultRows("same_cap", COLUMNS, arguments.rows)
    if not arguments.summary:
        if arguments.data is None:
            parser.error("--data FOLDER is needed to run anything")
        from leantune.memory import parse_size

        runs = Runs(rows, arguments.data, arguments.steps, arguments.threads)
        for side in SIDES:
            runs.run(side, parse_size(arguments.cap), runs.best_rate(side))
    summarise(rows)


if __name__ == "__main__":
    main()
