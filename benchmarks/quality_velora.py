"""What VeLoRA costs in quality and saves in memory, beside full fine-tuning, GaLore, LoRA, QLoRA and checkpointing.

    python benchmarks/quality_velora.py --data FOLDER [--only smollm-cut] [--methods full,velora] [--threads 1]
    python benchmarks/quality_velora.py --data FOLDER --steps 3 --rows /tmp/velora.csv   # every arm for a moment
    python benchmarks/quality_velora.py --plan --rows /tmp/velora.csv                    # hours of the whole, from that
    python benchmarks/quality_velora.py --summary                                        # Markdown tables from the rows

Tasks (FOLDER and models as in quality_optim.py; what is missing is skipped and said):
  rte           MiniLM encoder (22 M, fp32) on RTE
  rte-smollm    SmolLM2-135M (bf16) on RTE, judged by the likelihood of its answer; one seed
  smollm-cut    the first 4 layers of SmolLM2-135M (19 M, bf16) on GSM8K text
  digits-vit, digits-cnn   a vision transformer and a CNN on scikit-learn's digits
  lstm          an LSTM over the characters of Tiny Shakespeare

Every arm but "full-plain" trains under exact savings, so that a byte VeLoRA saves is one that nothing else does; where
exact savings are on, the numbers are those of the plain model. Arms: full (AdamW), full-plain (without exact savings),
checkpoint (every block recomputed), galore (galore-torch, rank 64), velora, lora (rank 16, dropout 0.05), lora+velora,
qlora (nf4, nested), qlora+velora; and, at VeLoRA's best rate, its ablations: factored training, directions set anew
every 1 or 10 forwards, other numbers of sub-tokens, other layers ("paper": value and down projections).

Each searched arm's rate: a grid of factors of 2 with seed 0, extended until the best is interior; three seeds at the
best, one for the digits. Arms see the same weights at the start and the same batches. A row of
results/quality_velora.csv a run; what is there is not run again. Memory by part is what `MemoryTracker` counts in the
second step; speed is of the steps after it, by the process's own time. ``gap``: held-out loss less training loss, the
latter on batches of training data drawn for that alone.
"""

import argparse
import functools
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from quality.entailment import AnswerTask
from quality.methods import set_rate
from quality.recurrent import RecurrentTask
from quality.search import Study, best_power
from quality.summary import markdown, mean_and_error
from quality.task import MissingData, Task
from quality.tasks import TASKS as OTHER_TASKS
from quality.training import Cell, rate, rate_factor, to_hex
from quality.velora_methods import ABLATIONS, ARMS, Layers, evaluating, prepare
from rows import ResultRows

from leantune.memory.measured.tracker import MemoryTracker
from leantune.memory.parts import ACTIVATIONS, GRADIENTS, OPTIMIZER_STATES, WEIGHTS
from leantune.memory.sizes import MIB

PARTS = {"parameters": WEIGHTS, "gradients": GRADIENTS, "states": OPTIMIZER_STATES}
COLUMNS = (
    "task", "batch", "method", "lr", "steps", "stage", "validation_loss", "training_loss", "gap", "accuracy",
    *(f"{part}_bytes" for part in PARTS), "activations_bytes", "peak_bytes", "velora_saved_bytes", "items_per_second",
    "threads", "seconds", "cpu_seconds", "correct",
)  # fmt: skip
"""``activations_bytes``: kept when backward begins, the loss's own aside. ``items_per_second``: tokens of text, images
of digits."""
ALL_ARMS = ARMS | ABLATIONS
TASKS: dict[str, type[Task]] = {
    name: OTHER_TASKS[name] for name in ("rte", "smollm-cut", "digits-vit", "digits-cnn")
} | {"lstm": RecurrentTask, "rte-smollm": AnswerTask}
_QKV, _BERT_QKV = ("q_proj", "k_proj", "v_proj"), ("query", "key", "value")
LAYERS = {
    "rte": Layers(
        (*_BERT_QKV, "intermediate.dense"), 32, (*_BERT_QKV, "dense"), checkpoints=True,
        variants={
            "paper": ("value", "output.dense"), "attention": _BERT_QKV, "mlp": ("intermediate.dense",),
            "down": ("output.dense",),
        },
    ),
    "smollm-cut": Layers(
        (*_QKV, "gate_proj", "up_proj"), 32, (*_QKV, "o_proj", "gate_proj", "up_proj", "down_proj"), checkpoints=True,
        variants={
            "paper": ("v_proj", "down_proj"), "attention": _QKV, "mlp": ("gate_proj", "up_proj"),
            "down": ("down_proj",),
        },
    ),
    "rte-smollm": Layers(
        (*_QKV, "gate_proj", "up_proj"), 32, (*_QKV, "o_proj", "gate_proj", "up_proj", "down_proj"), checkpoints=True
    ),
    "digits-vit": Layers(
        ("qkv", "up", "down"), 16, variants={"attention": ("qkv",), "mlp": ("up", "down"), "down": ("down",)}
    ),
    "digits-cnn": Layers(("3",), 8),
    "lstm": Layers(("cell",), 32),
}  # fmt: skip
CELLS = (
    Cell("rte", batch=16, steps=60, power=-4),
    Cell("smollm-cut", batch=8, steps=60, power=1),
    Cell("digits-vit", batch=64, steps=120, power=3, seeds=1),
    Cell("digits-cnn", batch=64, steps=120, power=4, seeds=1),
    Cell("lstm", batch=32, steps=250, power=3),
    Cell("rte-smollm", batch=16, steps=30, power=-5, seeds=1),
)
GROUPS = {
    "rte": (8, 16, 64, 96, 192), "smollm-cut": (8, 16, 64, 96, 192), "digits-vit": (4, 8), "digits-cnn": (4,),
    "lstm": (8, 16, 64), "rte-smollm": (),
}  # fmt: skip
"""Numbers of sub-tokens to ablate."""
RATES_A_SEARCH = 4
JUDGED_BATCHES = 8


def arms_of(task: str) -> list[str]:
    """Names of the arms a task runs, searched ones first."""
    return [
        name
        for name, arm in ALL_ARMS.items()
        if arm.possible(LAYERS[task]) and (arm.groups is None or arm.groups in GROUPS[task])
    ]


def items(task: Task, batch: Any) -> int:
    """Tokens, or images, of a batch."""
    if isinstance(task, AnswerTask):
        return task.rte.tokens(batch)
    if task.name == "rte":
        return sum(len(side[place]["input_ids"]) for side in (task.premises, task.hypotheses) for place in batch)
    return len(batch[0]) if task.name.startswith("digits") else batch[0].numel()


class VeloraStudy(Study):
    """Runs of the arms."""

    def train(self, task: Task, cell: Cell, method: str, lr: float, seed: int, judge: bool) -> dict[str, Any]:
        start = time.perf_counter()
        torch.manual_seed(seed)
        arm = prepare(task.model(seed), ALL_ARMS[method], LAYERS[cell.task], lr, task.weights, seed)
        generator = torch.Generator().manual_seed(1000 + seed)
        row: dict[str, Any] = {"validation_loss": float("inf"), "threads": torch.get_num_threads()}
        seconds, counted, finite = 0.0, 0, True
        for number in range(cell.steps):
            set_rate(arm.optimizer, lr * rate_factor(number, cell.steps))
            batch = task.batch(cell.batch, generator)
            tracker = MemoryTracker(arm.model, arm.optimizer) if number == 1 else None
            began = time.process_time()
            if tracker is not None:
                tracker.start()
            try:
                arm.optimizer.zero_grad()
                loss = task.loss(arm.model, batch)
                loss.backward()
                arm.optimizer.step()
            finally:
                if tracker is not None:
                    tracker.stop()
            if tracker is not None:
                row |= _bytes(tracker)
            elif number:
                seconds, counted = seconds + time.process_time() - began, counted + items(task, batch)
            finite = math.isfinite(loss.item())
            if not finite:
                break
        if seconds:
            row |= {"items_per_second": counted / seconds, "cpu_seconds": seconds * cell.steps / max(1, number - 1)}
        if arm.velora is not None:
            row["velora_saved_bytes"] = arm.velora.report().saved_bytes
        if finite and judge:
            row |= _judged(task, cell, arm.model)
        return row | {"seconds": time.perf_counter() - start}


def _bytes(tracker: MemoryTracker) -> dict[str, int]:
    timeline = tracker.timeline()
    peaks = timeline.part_peaks()
    kept = timeline.saved_at_forward_end()[ACTIVATIONS]
    found = {f"{name}_bytes": peaks[part] for name, part in PARTS.items()}
    return found | {"activations_bytes": kept, "peak_bytes": timeline.peak_bytes}


def _judged(task: Task, cell: Cell, model: torch.nn.Module) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(77)
    with evaluating(model):
        judged = task.evaluate(model)
        batches = [task.batch(cell.batch, generator) for _ in range(JUDGED_BATCHES)]
        training = statistics.mean(task.loss(model, batch).item() for batch in batches)
    found: dict[str, Any] = {"training_loss": training, "gap": judged.loss - training}
    if math.isfinite(judged.loss):
        found["validation_loss"] = judged.loss
    if judged.correct is not None:
        found |= {"accuracy": judged.accuracy, "correct": to_hex(judged.correct.tolist())}
    return found


class Benchmark:
    """The work in order: searched arms of every cell, then those that take another's rate."""

    def __init__(self, rows: ResultRows, data: Path, cells: list[Cell], methods: list[str]) -> None:
        self.rows, self.data, self.cells, self.methods = rows, data, cells, methods
        self.study = VeloraStudy(rows, {})

    def run(self, steps: int | None = None) -> None:
        """``steps``: a rehearsal of so many, once each."""
        for cell in self.cells:
            try:
                task = load_task(cell.task, self.data)
            except MissingData as missing:
                print(f"skipped {cell.task}: {missing}", flush=True)
                continue
            for method in [name for name in arms_of(cell.task) if name in self.methods]:
                try:
                    self._arm(task, cell, method, steps)
                except MissingData as missing:
                    print(f"skipped {method}: {missing}", flush=True)

    def _arm(self, task: Task, cell: Cell, method: str, steps: int | None) -> None:
        arm = ALL_ARMS[method]
        if steps is not None:
            short = Cell(cell.task, cell.batch, steps, cell.power)
            self.study.ensure(task, short, method, rate(cell.power + arm.offset), 0, "rehearsal")
            return
        known = best_power(self.rows, cell, "full")
        start = (cell.power if known is None else known) + arm.offset
        if arm.rate_of is None:
            best = self.study.search(task, cell, method, start)
            self.study.seeds(task, cell, method, best, cell.seeds)
            return
        others = best_power(self.rows, cell, arm.rate_of)
        if others is None:
            print(f"skipped {method} on {cell.task}: {arm.rate_of} has no rows yet", flush=True)
            return
        one = method in ("full-plain", "checkpoint")
        self.study.ensure(task, cell, method, rate(others), 0, "fixed")
        self.study.seeds(task, cell, method, others, 1 if one else cell.seeds)


@functools.lru_cache(maxsize=1)
def load_task(name: str, data: Path) -> Task:
    return TASKS[name](data)


def plan(rows: ResultRows, cells: list[Cell], methods: list[str]) -> None:
    """Core hours of the whole from a rehearsal's rows."""
    total = 0.0
    for cell in cells:
        hours, missing = 0.0, []
        for method in [name for name in arms_of(cell.task) if name in methods]:
            found = rows.find(task=cell.task, batch=cell.batch, method=method, stage="rehearsal")
            if not found or not found[-1]["cpu_seconds"]:
                missing.append(method)
                continue
            row = found[-1]
            step = float(row["cpu_seconds"]) / int(row["steps"])
            runs = cell.seeds if ALL_ARMS[method].rate_of else RATES_A_SEARCH + cell.seeds - 1
            judging = max(0.0, float(row["seconds"]) - float(row["cpu_seconds"]))
            hours += runs * (step * cell.steps + judging) / 3600
        total += hours
        print(f"{cell.task:11} {hours:6.2f} hours" + (f"  not rehearsed: {', '.join(missing)}" if missing else ""))
    print(f"in all {total:.1f} core hours of one-thread runs")


def table(rows: ResultRows, cell: Cell, methods: list[str]) -> str:
    """The arms of a cell, each at the rate that was best with seed 0; "" where nothing was run."""
    sizes = ("parameters", "gradients", "states", "activations", "peak")
    headings = ["method", "lr", "held-out loss", "training loss", "gap", "accuracy %", *(f"{s} MiB" for s in sizes),
                "VeLoRA saves MiB", "items/s"]  # fmt: skip
    lines = []
    for method in [name for name in arms_of(cell.task) if name in methods]:
        power = best_power(rows, cell, method)
        if power is None:
            continue
        found = rows.find(task=cell.task, batch=cell.batch, steps=cell.steps, method=method, lr=rate(power))

        def values(column: str, found: list[dict[str, str]] = found) -> list[float]:
            return [float(row[column]) for row in found if row[column]]

        losses = [mean_and_error(values(name), 4) if values(name) else "" for name in
                  ("validation_loss", "training_loss", "gap")]  # fmt: skip
        accuracy = [100 * value for value in values("accuracy")]
        lines.append(
            [
                method,
                f"{rate(power):.3g}",
                *losses,
                mean_and_error(accuracy, 1) if accuracy else "",
                *(f"{max(values(f'{size}_bytes'), default=0) / MIB:.1f}" for size in sizes),
                f"{max(values('velora_saved_bytes')) / MIB:.2f}" if values("velora_saved_bytes") else "",
                f"{statistics.median(values('items_per_second')):.0f}" if values("items_per_second") else "",
            ]
        )
    return markdown(headings, lines) if lines else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with the texts and tables")
    parser.add_argument("--only", default=",".join(TASKS), help="tasks to run, separated by commas")
    parser.add_argument("--methods", default=",".join(ALL_ARMS), help="arms to run, separated by commas")
    parser.add_argument("--rows", type=Path, help="another CSV file, for rehearsals")
    parser.add_argument("--steps", type=int, help="run every arm once, for so many steps (with --rows)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plan", action="store_true", help="print what the whole takes, from a rehearsal in --rows")
    parser.add_argument("--summary", action="store_true", help="print the tables from the rows and stop")
    arguments = parser.parse_args()
    methods, only = arguments.methods.split(","), arguments.only.split(",")
    unknown = sorted({*only, *methods} - {*TASKS, *ALL_ARMS})
    if unknown:
        parser.error(f"no task or arm {', '.join(unknown)}; tasks: {', '.join(TASKS)}; arms: {', '.join(ALL_ARMS)}")
    if arguments.steps is not None and (arguments.rows is None or arguments.steps < 3):
        parser.error("--steps is for rehearsals, of 3 or more: give --rows FILE, so that they stay out of the results")
    torch.set_num_threads(arguments.threads)
    rows = ResultRows("quality_velora", COLUMNS, arguments.rows)
    cells = [cell for cell in CELLS if cell.task in only]
    if arguments.plan:
        plan(rows, cells, methods)
        return
    if not arguments.summary:
        if arguments.data is None:
            parser.error("--data FOLDER is needed to run anything (see --help for what it holds)")
        Benchmark(rows, arguments.data, cells, methods).run(arguments.steps)
        if arguments.steps is not None:
            return
    for cell in cells:
        if text := table(rows, cell, methods):
            print(f"\n### {cell.task}, batch {cell.batch}, {cell.steps} steps\n\n{text}")


if __name__ == "__main__":
    main()
