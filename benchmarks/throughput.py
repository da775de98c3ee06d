"""Tokens a second of `leantune train` against TRL's own SFTTrainer, the same model, rows and settings.

    python benchmarks/throughput.py --data FOLDER [--rounds 5] [--batch 4] [--threads 2]
    python benchmarks/throughput.py --summary

SmolLM2-135M (the folder that ``leantune demo`` keeps), bf16 weights, all of them trained, answers of GSM8K, rows of at
most 256 tokens; FOLDER holds gsm8k_train_2000.jsonl. All sides run in one process, a short training of each a round in
turn, on the same rows in the same order; the first two steps of a training are not counted. ``speed_ratio`` is the
median of the rounds' own ratios of tokens/s to TRL's; ``peak_bytes`` is of all tensors in one step, not a timed one.
  trl              SFTTrainer, adamw_torch, nothing else set
  adamw            leantune train with adamw_torch, ordinary backward, full logits: TRL's settings
  adamw-saving     the same with exact savings, leantune's default
  defaults         leantune train as it is: ternary states, fused backward, exact savings
  defaults-checkpointing, trl-checkpointing   every block recomputed
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rows import ResultRows
from transformers import AutoModelForCausalLM, TrainerCallback, set_seed
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

from leantune.errors import ConfigError
from leantune.memory import MemoryTracker
from leantune.training.config import TrainConfig, build_config
from leantune.training.demo_model import demo_model_path
from leantune.training.run import build_trainer, load_model, load_rows

LENGTH, STEPS, UNCOUNTED = 256, 6, 2
RATE = 1e-5
COLUMNS = ("side", "batch", "length", "threads", "rounds", "tokens_per_second", "speed_ratio", "ratio_min", "ratio_max",
           "peak_bytes")  # fmt: skip
SIDES: dict[str, dict[str, Any]] = {
    "trl": {},
    "adamw": {"optim": "adamw_torch", "fused_backward": False, "exact_savings": False},
    "adamw-saving": {"optim": "adamw_torch", "fused_backward": False},
    "defaults": {},
    "trl-checkpointing": {"gradient_checkpointing": True},
    "defaults-checkpointing": {"gradient_checkpointing": True},
}
"""Name -> what is set. Beginning with trl: arguments of SFTConfig; else keys of ``leantune train``."""


class StepTimes(TrainerCallback):
    """When each step began, and the last one ended."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_begin(self, *arguments: Any, **rest: Any) -> None:
        """Note it."""
        self.marks.append(time.perf_counter())

    def on_train_end(self, *arguments: Any, **rest: Any) -> None:
        """Note it."""
        self.marks.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """Of the counted steps."""
        return self.marks[-1] - self.marks[UNCOUNTED]


class PeakOfSecondStep(TrainerCallback):
    """All tensors' peak in the second step, when optimizer states exist."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.bytes = trainer, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Count from here..."""
        if state.global_step == 1:
            optimizer = self.trainer.optimizer
            self.tracker = MemoryTracker(self.trainer.model, getattr(optimizer, "optimizer", optimizer)).start()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """... to here, and stop training: such a step's time says nothing."""
        if state.global_step == 2:
            self.tracker.stop()
            self.bytes = self.tracker.timeline().peak_bytes
            control.should_training_stop = True


class Sides:
    """Trainers of each side, built anew for each training, on rows that are prepared once."""

    def __init__(self, data: Path, batch: int, folder: Path) -> None:
        self.path, self.batch, self.folder = demo_model_path(), batch, folder
        self.rows = data / "gsm8k_train_2000.jsonl"
        if not self.rows.is_file():
            raise SystemExit(f"{self.rows} is not there: GSM8K, github.com/openai/grade-school-math, MIT")
        _, self.tokenizer, self.data = load_rows(self.config("adamw"))

    def config(self, side: str) -> TrainConfig:
        return build_config(
            {
                "model_name_or_path": str(self.path),
                "dataset": str(self.rows),
                "output_dir": str(self.folder / side),
                "max_length": LENGTH,
                "learning_rate": RATE,
                "per_device_train_batch_size": self.batch,
                "max_steps": STEPS,
                "logging_steps": STEPS,
                "eval_split": 0.01,
                **SIDES[side],
            }
        )

    def trainer(self, side: str) -> Any:
        if not side.startswith("trl"):
            config = self.config(side)
            set_seed(config.seed)
            return build_trainer(config, load_model(config), self.tokenizer, self.data)
        config = self.config("adamw")
        set_seed(config.seed)
        arguments = SFTConfig(
            output_dir=str(self.folder / side),
            learning_rate=RATE,
            max_steps=STEPS,
            per_device_train_batch_size=self.batch,
            max_length=None,
            logging_steps=STEPS,
            save_strategy="no",
            report_to="none",
            seed=config.seed,
            data_seed=config.seed,
            bf16=False,
            optim="adamw_torch",
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
            **{"gradient_checkpointing": False, **SIDES[side]},
        )
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.bfloat16)
        return SFTTrainer(model=model, args=arguments, train_dataset=self.data.train, processing_class=self.tokenizer)

    def seconds(self, side: str) -> tuple[float, float]:
        """Of the counted steps of one training, and its training loss."""
        trainer, times = self.trainer(side), StepTimes()
        trainer.add_callback(times)
        loss = trainer.train().training_loss
        _release(trainer)
        return times.seconds, loss

    def peak(self, side: str) -> int:
        trainer = self.trainer(side)
        probe = PeakOfSecondStep(trainer)
        trainer.add_callback(probe)
        trainer.train()
        _release(trainer)
        return probe.bytes


def _release(trainer: Any) -> None:
    attached = getattr(trainer, "attached", None)
    if attached is not None:
        attached.remove()


def tokens_of_counted_steps(sides: Sides) -> int:
    """Padding aside, from the order in which one of the trainers takes rows (all take the same)."""
    trainer = sides.trainer("trl")
    batches = [batch for _, batch in zip(range(STEPS), trainer.get_train_dataloader())]
    return sum(int(batch["attention_mask"].sum()) for batch in batches[UNCOUNTED:])


def measure(sides: Sides, names: list[str], rounds: int, rows: ResultRows, threads: int) -> None:
    peaks = {name: sides.peak(name) for name in names}
    tokens = tokens_of_counted_steps(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            taken, loss = sides.seconds(name)
            seconds[name].append(taken)
            print(f"round {number} {name:24} {tokens / taken:7.1f} tokens/s, loss {loss:.5f}", flush=True)
    for name in names:
        reference = "trl-checkpointing" if name.endswith("checkpointing") else "trl"
        if reference not in seconds:
            continue
        ratios = [theirs / ours for theirs, ours in zip(seconds[reference], seconds[name])]
        rows.append(
            seed=0,
            side=name,
            batch=sides.batch,
            length=LENGTH,
            threads=threads,
            rounds=rounds,
            tokens_per_second=tokens / statistics.median(seconds[name]),
            speed_ratio=statistics.median(ratios),
            ratio_min=min(ratios),
            ratio_max=max(ratios),
            peak_bytes=peaks[name],
        )


def summarise(rows: ResultRows) -> None:
    for row in rows.read():
        ratio, low, high = (float(row[key]) for key in ("speed_ratio", "ratio_min", "ratio_max"))
        print(
            f"batch {row['batch']} {row['side']:24} {float(row['tokens_per_second']):7.1f} tokens/s, "
            f"{ratio:.3f} ({low:.3f} to {high:.3f}) of TRL's, peak {int(row['peak_bytes']) / 2**20:,.0f} MiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with gsm8k_train_2000.jsonl")
    parser.add_argument("--sides", default=",".join(SIDES), help="sides to run, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4, help="rows a step")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--rows", type=Path, help="another CSV file, for rehearsals")
    parser.add_argument("--summary", action="store_true", help="print the rows and stop")
    arguments = parser.parse_args()
    rows = ResultRows("throughput", COLUMNS, arguments.rows)
    if not arguments.summary:
        if arguments.data is None:
            parser.error("--data FOLDER is needed to run anything")
        names = arguments.sides.split(",")
        if unknown := sorted(set(names) - set(SIDES)):
            parser.error(f"no side {', '.join(unknown)}; sides: {', '.join(SIDES)}")
        logging.set_verbosity_error()
        torch.set_num_threads(arguments.threads)
        with tempfile.TemporaryDirectory() as folder:
            try:
                sides = Sides(arguments.data, arguments.batch, Path(folder))
            except ConfigError as error:
                raise SystemExit(str(error)) from None
            measure(sides, names, arguments.rounds, rows, arguments.threads)
    summarise(rows)


if __name__ == "__main__":
    main()
