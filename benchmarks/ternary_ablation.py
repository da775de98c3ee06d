"""What decides the quality of the ternary optimizer: one setting changed at a time.

    python benchmarks/ternary_ablation.py --data FOLDER [--only llama] [--arms base,rank-0] [--threads 1]
    python benchmarks/ternary_ablation.py --data FOLDER --arms rank-8 --seeds 3   # seeds for arms that look better
    python benchmarks/ternary_ablation.py --summary      # the Markdown table from the rows, nothing is run

Arms change ``TernaryAdamW``'s defaults (one momentum plane, carry of rank 4, blocks of 128, beta2 .999): the carry's
rank, the block, the planes, beta2, exact states for embeddings, and, where weights are bf16, how they are rounded.
Tasks and runs are those of quality_optim.py, which says what FOLDER holds: small matrices from scratch (characters,
llama) and real width (smollm-cut, 576), each at a small and a large batch; and, for the carry's rank alone, Llamas of
one and two layers, 1,024 and 2,048 wide, from scratch on llama's text (wide-1024, wide-2048). The rate of each arm is
searched with seed 0, beginning at the base's best; AdamW's rows are there for scale. One row a run in
results/ternary_ablation.csv.

On characters and llama further arms (quality/scheme.py) change the scheme itself, in plain torch: the momentum's
threshold, the share of what is dropped that a step releases, a bound on |n|, v without column factors or without trits,
the rule of its log-step.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from quality.methods import BETAS, WEIGHT_DECAY, Build, adamw, ternary
from quality.scheme import SCHEME_ARMS
from quality.search import Study, best_power
from quality.subword import WideTask
from quality.summary import REFERENCE, entry, markdown, mean_and_error, paired_ratio
from quality.task import MissingData
from quality.tasks import TASKS, load_task
from quality.training import COLUMNS, Cell, rate
from quality_optim import CELLS
from rows import ResultRows
from torch import nn

import leantune as lt

BASE = "base"
STUDIED = ("characters", "llama", "smollm-cut", "wide-1024", "wide-2048")
WIDE_CELLS = (
    Cell("wide-1024", batch=12, steps=100, power=0),
    Cell("wide-1024", batch=48, steps=60, power=0),
    Cell("wide-2048", batch=48, steps=60, power=-1),
)


def exact_embeddings(model: nn.Module, lr: float, weights: str, seed: int) -> torch.optim.Optimizer:
    """Embeddings (and a head tied to them) keep fp32 states, everything else is ternary."""
    exact = {id(module.weight): module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    others = [parameter for parameter in model.parameters() if id(parameter) not in exact]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": list(exact.values()), "states": "exact"}]
    return lt.TernaryAdamW(groups, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, seed=seed)


ARMS: dict[str, Build] = {
    "adamw": adamw,
    BASE: ternary(),
    "rank-0": ternary(carry_rank=0),
    "rank-1": ternary(carry_rank=1),
    "rank-2": ternary(carry_rank=2),
    "rank-8": ternary(carry_rank=8),
    "block-64": ternary(block_size=64),
    "block-256": ternary(block_size=256),
    "planes-2": ternary(momentum_planes=2),
    "planes-2-rank-0": ternary(momentum_planes=2, carry_rank=0),
    "beta2-.95": ternary(betas=(BETAS[0], 0.95)),
    "beta2-.99": ternary(betas=(BETAS[0], 0.99)),
    "exact-embeddings": exact_embeddings,
    "exact": ternary(states="exact"),
}
BF16_ARMS: dict[str, Build] = {
    "nearest": ternary(rounding="nearest"),
    "master-24": ternary(master_bits=24),
    "exact-nearest": ternary(states="exact", rounding="nearest"),
}
"""Only where weights are bf16; the base rounds stochastically."""
RANK_ARMS = ("adamw", BASE, "rank-0", "rank-1", "rank-2", "rank-8")
EVERY_ARM = ARMS | BF16_ARMS | SCHEME_ARMS


def arms_of(cell: Cell) -> list[str]:
    if issubclass(TASKS[cell.task], WideTask):
        return list(RANK_ARMS)
    return [*ARMS, *(BF16_ARMS if TASKS[cell.task].weights == "bf16" else SCHEME_ARMS)]


def table(rows: ResultRows, cells: list[Cell]) -> str:
    """Arms by cells: loss over AdamW's with the same seed, each at its own best rate; empty where none was run."""
    cells = [cell for cell in cells if rows.find(task=cell.task, batch=cell.batch, steps=cell.steps, method=REFERENCE)]
    lines = []
    for arm in EVERY_ARM:
        found = [(entry(rows, cell, arm), entry(rows, cell, REFERENCE)) for cell in cells]
        ratios = [
            mean_and_error(paired_ratio(ours, reference), 4) + ours.note if ours and reference else ""
            for ours, reference in found
        ]
        if any(ratios):
            lines.append([arm, *ratios])
    return markdown(["arm", *(f"{cell.task}, {cell.batch}" for cell in cells)], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with the texts (see quality_optim.py)")
    parser.add_argument("--only", default=",".join(STUDIED), help="tasks to run, separated by commas")
    parser.add_argument("--arms", default=",".join(EVERY_ARM), help="arms to run, separated by commas")
    parser.add_argument("--seeds", type=int, default=1, help="seeds at each arm's best rate")
    parser.add_argument("--rows", type=Path, help="another CSV file, for rehearsals")
    parser.add_argument("--steps", type=int, help="fewer steps than the cells say, for rehearsals (with --rows)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (1: run two processes on two cores)")
    parser.add_argument("--summary", action="store_true", help="print the tables from the rows and stop")
    arguments = parser.parse_args()
    asked = arguments.arms.split(",")
    unknown = sorted({*asked, *arguments.only.split(",")} - {*EVERY_ARM, *TASKS})
    if unknown:
        parser.error(f"no task or arm {', '.join(unknown)}; tasks: {', '.join(TASKS)}; arms: {', '.join(EVERY_ARM)}")
    if arguments.steps is not None and arguments.rows is None:
        parser.error("--steps is for rehearsals: give --rows FILE, so that they stay out of the results")
    torch.set_num_threads(arguments.threads)
    rows = ResultRows("ternary_ablation", COLUMNS, arguments.rows)
    study = Study(rows, EVERY_ARM)
    cells = [
        Cell(cell.task, cell.batch, arguments.steps or cell.steps, cell.power)
        for cell in (*CELLS, *WIDE_CELLS)
        if cell.task in arguments.only.split(",")
    ]
    if not arguments.summary:
        if arguments.data is None:
            parser.error("--data FOLDER is needed to run anything")
        for cell in cells:
            try:
                task = load_task(cell.task, arguments.data)
            except MissingData as missing:
                print(f"skipped {cell.task}: {missing}", flush=True)
                continue
            for arm in [name for name in arms_of(cell) if name in asked]:
                if arguments.steps is not None:
                    study.ensure(task, cell, arm, rate(cell.power), 0, "rehearsal")
                    continue
                known = best_power(rows, cell, BASE)
                best = study.search(task, cell, arm, cell.power if known is None else known)
                study.seeds(task, cell, arm, best, arguments.seeds)
    print(table(rows, cells))


if __name__ == "__main__":
    main()
