"""Does the ternary optimizer train as well as AdamW, and better than the low-bit peers?

    python benchmarks/quality_optim.py --data FOLDER [--only characters,rte] [--methods adamw,ternary-r4] [--threads 1]
    python benchmarks/quality_optim.py --summary              # Markdown tables from the rows, nothing is run
    python benchmarks/quality_optim.py --data FOLDER --rows /tmp/rehearsal.csv --steps 4    # every method for a moment
    python benchmarks/quality_optim.py --plan --rows /tmp/rehearsal.csv       # hours of the whole, from that rehearsal

Tasks, each at two batch sizes at least four times apart:
  characters    0.8 M-parameter character model from scratch, Tiny Shakespeare
  llama         1.4 M-parameter Llama from scratch, subword text (Tiny Shakespeare and GSM8K)
  mixture       1.8 M-parameter Qwen3-MoE from scratch, the same text, 3-D expert weights
  rte           MiniLM encoder (22 M) fine-tuned on RTE: 1,000 pairs to train on, 1,767 held out (the standard error of
                an accuracy is 1.2 points); the controls are run once, at AdamW's rate
  smollm-cut    the first 4 layers of SmolLM2-135M (19 M), bf16 weights, on GSM8K text
  smollm        SmolLM2-135M itself: AdamW and ternary searched around the cut's rates, two seeds; peers once at AdamW's
                rate
  digits-vit, digits-cnn   scikit-learn's digits: smoke tests, one seed
FOLDER holds tinyshakespeare.txt, gsm8k_train_2000.jsonl and gsm8k_test_400.jsonl (the first rows of GSM8K),
rte_train.tsv and rte_dev.tsv (GLUE). A task whose data or model is missing is skipped, and says what to fetch.

For each (task, batch, method): the learning rate is searched on a grid of factors of 2 with seed 0, extended until the
best is interior; then three seeds at the best for AdamW, three ternary variants and the three strongest peers, one for
the rest. All methods see the same weights at the start and the same batches; the rate rises over a tenth of the steps
and falls linearly to a tenth. One row a run in results/quality_optim.csv; a run whose row exists is not repeated. Two
processes may share the file on different tasks.
"""

import argparse
import statistics
from pathlib import Path

import torch
from quality.methods import METHODS, SEEDED, TIERS
from quality.search import Study, start_power, strongest_peers
from quality.summary import print_summary
from quality.task import MissingData, Task
from quality.tasks import TASKS, load_task
from quality.training import COLUMNS, Cell, rate
from rows import ResultRows

# Steps are what 12 core hours allow. Where they end loss still falls; AdamW's seeds agree to half a percent or better.
CONTROLS = ("laprop", "adamw-beta1-0", "ternary-2p-r0", "sgd")
CELLS = (
    Cell("characters", batch=16, steps=250, power=2),
    Cell("characters", batch=64, steps=80, power=3),
    Cell("llama", batch=12, steps=220, power=3),
    Cell("llama", batch=48, steps=70, power=3),
    Cell("mixture", batch=12, steps=250, power=3),
    Cell("mixture", batch=48, steps=100, power=3),
    Cell("rte", batch=4, steps=80, power=-5, fixed=CONTROLS),
    Cell("rte", batch=16, steps=30, power=-4, fixed=CONTROLS),
    Cell("smollm-cut", batch=2, steps=36, power=2),
    Cell("smollm-cut", batch=8, steps=20, power=1),
    Cell(
        "smollm", batch=2, steps=24, power=-3, seeds=2, searched=("adamw", "ternary-r4"),
        fixed=("torchao-8bit", "adamw-plain"),
    ),
    Cell(
        "smollm", batch=8, steps=10, power=-3, seeds=2, searched=("adamw", "ternary-r4"),
        fixed=("torchao-8bit", "adamw-plain"),
    ),
    Cell("digits-vit", batch=16, steps=200, power=3, seeds=1),
    Cell("digits-vit", batch=128, steps=60, power=3, seeds=1),
    Cell("digits-cnn", batch=16, steps=200, power=4, seeds=1),
    Cell("digits-cnn", batch=128, steps=60, power=5, seeds=1),
)  # fmt: skip
RATES_A_SEARCH = 3.7
"""What a search takes on average, for the plan: three, and more where it has to move."""


class Benchmark:
    """The work in order: tier after tier, in each tier every cell."""

    def __init__(self, rows: ResultRows, data: Path, cells: list[Cell], methods: list[str]) -> None:
        self.rows, self.data, self.cells, self.methods = rows, data, cells, methods
        self.study = Study(rows, {name: method.build for name, method in METHODS.items()})
        self.missing: set[str] = set()

    def task(self, cell: Cell) -> Task | None:
        if cell.task in self.missing:
            return None
        try:
            return load_task(cell.task, self.data)
        except MissingData as missing:
            print(f"skipped {cell.task}: {missing}", flush=True)
            self.missing.add(cell.task)
            return None

    def run(self) -> None:
        for tier in TIERS:
            for cell in self.cells:
                for method in [name for name in tier if name in wanted(cell) and name in self.methods]:
                    self.run_method(cell, method)
        for cell in self.cells:
            if cell.searched is None:
                for method in strongest_peers(self.rows, cell):
                    if method in self.methods:
                        self.run_method(cell, method, seeds=cell.seeds)

    def run_method(self, cell: Cell, method: str, seeds: int | None = None) -> None:
        task = self.task(cell)
        if task is None:
            return
        start = start_power(self.rows, cell, method)
        if method in cell.fixed:
            self.study.ensure(task, cell, method, rate(start), 0, "fixed")
            return
        best = self.study.search(task, cell, method, start)
        if seeds is None:
            seeds = cell.seeds if method in SEEDED else 1
        self.study.seeds(task, cell, method, best, seeds)

    def rehearse(self, steps: int) -> None:
        """Every method on every cell for a few steps, seed 0; one is judged, for the time it takes."""
        for cell in self.cells:
            task = self.task(cell)
            for method in [name for name in self.methods if task is not None and name in wanted(cell)]:
                short = Cell(cell.task, cell.batch, steps, cell.power)
                self.study.ensure(
                    task,
                    short,
                    method,
                    rate(cell.power + METHODS[method].offset),
                    0,
                    "rehearsal",
                    judge=method == "adamw",
                )


def wanted(cell: Cell) -> list[str]:
    """The methods of a cell, by its weights' format, where it begins, and its own lists."""
    task = TASKS[cell.task]
    names = [
        name
        for name, method in METHODS.items()
        if task.weights in method.only and (task.pretrained or not method.fine_tuning)
    ]
    return names if cell.searched is None else [name for name in names if name in (*cell.searched, *cell.fixed)]


def runs_of(cell: Cell, method: str) -> float:
    """How often the plan expects a method to be run on a cell; the strongest peers' further seeds are spread."""
    if method in cell.fixed:
        return 1
    further = cell.seeds - 1
    return RATES_A_SEARCH + (further if method in SEEDED else further / 2 if "bit" in method else further / 4)


def plan(rows: ResultRows, cells: list[Cell], methods: list[str]) -> None:
    """Core hours of the whole from a rehearsal's rows: its seconds a step at the cell's steps, plus its evaluation.

    A method that was not rehearsed on a cell counts as much as the slowest that was, and is named.
    """
    total = 0.0
    print(f"{'task':11} {'batch':>5} {'steps':>5} {'runs':>5} {'AdamW s':>8} {'median':>7} {'most':>6} {'hours':>6}")
    for cell in cells:
        seconds: dict[str, float] = {}
        evaluation = 0.0
        for method in [name for name in wanted(cell) if name in methods]:
            found = rows.find(task=cell.task, batch=cell.batch, method=method, stage="rehearsal")
            if found:
                step = statistics.median(float(row["cpu_seconds"]) / int(row["steps"]) for row in found)
                evaluation = float(found[-1]["evaluation_seconds"] or evaluation)
                seconds[method] = step * cell.steps + evaluation
        missing = [name for name in wanted(cell) if name in methods and name not in seconds]
        if seconds:
            seconds |= dict.fromkeys(missing, max(seconds.values()))
        hours = sum(seconds[method] * runs_of(cell, method) for method in seconds) / 3600
        total += hours
        if seconds:
            print(
                f"{cell.task:11} {cell.batch:5} {cell.steps:5} {sum(runs_of(cell, method) for method in seconds):5.0f} "
                f"{seconds.get('adamw', float('nan')):8.0f} {statistics.median(seconds.values()):7.0f} "
                f"{max(seconds.values()):6.0f} {hours:6.2f}"
                + (f"  not rehearsed: {', '.join(missing)}" if missing else "")
            )
    print(f"in all {total:.1f} core hours of one-thread runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with the texts and tables named above")
    parser.add_argument("--only", default=",".join(TASKS), help="tasks to run, separated by commas")
    parser.add_argument("--batches", help="batch sizes to run, separated by commas (all)")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods to run, separated by commas")
    parser.add_argument("--rows", type=Path, help="another CSV file, for rehearsals")
    parser.add_argument("--steps", type=int, help="run every method once, for so many steps (with --rows)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (1: run two processes on two cores)")
    parser.add_argument("--plan", action="store_true", help="print what the whole takes, from a rehearsal in --rows")
    parser.add_argument("--summary", action="store_true", help="print the tables from the rows and stop")
    arguments = parser.parse_args()
    unknown = sorted({*arguments.only.split(","), *arguments.methods.split(",")} - {*TASKS, *METHODS})
    if unknown:
        parser.error(
            f"no task or method {', '.join(unknown)}; tasks: {', '.join(TASKS)}; methods: {', '.join(METHODS)}"
        )
    if arguments.steps is not None and arguments.rows is None:
        parser.error("--steps is for rehearsals: give --rows FILE, so that they stay out of the results")
    torch.set_num_threads(arguments.threads)
    rows = ResultRows("quality_optim", COLUMNS, arguments.rows)
    methods = arguments.methods.split(",")
    batches = None if arguments.batches is None else {int(batch) for batch in arguments.batches.split(",")}
    cells = [
        cell for cell in CELLS if cell.task in arguments.only.split(",") and (batches is None or cell.batch in batches)
    ]
    if arguments.plan:
        plan(rows, cells, methods)
        return
    if not arguments.summary:
        if arguments.data is None:
            parser.error("--data FOLDER is needed to run anything (see --help for what it holds)")
        benchmark = Benchmark(rows, arguments.data, cells, methods)
        if arguments.steps is not None:
            benchmark.rehearse(arguments.steps)
            return
        benchmark.run()
    print_summary(rows, cells, {name for name, task in TASKS.items() if task.smoke}, methods)


if __name__ == "__main__":
    main()
