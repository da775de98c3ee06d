"""How much of momentum a low-rank carry holds, by how often its basis V is worked out anew.

    python benchmarks/carry_basis.py --data FOLDER [--only characters,smollm-cut] [--rank 4] [--threads 1]

A model is trained with the exact rule (LaProp: `TernaryAdamW(states="exact")`). At each step every matrix's momentum u
is projected onto a V for each interval: V' = orth(u^T u V) every k steps, as `leantune/codec/low_rank.py` has it, and
once in ten steps onto the best there is, its leading right singular vectors. A row of results/carry_basis.csv is the
share |u V|^2 / |u|^2, averaged over matrices and over the second half of the steps. Tasks and data are those of
quality_optim.py.
"""

import argparse
import statistics
from collections import defaultdict
from pathlib import Path

import torch
from quality.methods import ternary
from quality.task import MissingData
from quality.tasks import load_task
from quality.training import rate_factor
from rows import ResultRows
from torch import Tensor

from leantune.codec.low_rank import initial_basis, next_basis

COLUMNS = ("task", "batch", "steps", "lr", "rank", "every", "share_held", "of_the_best")
RUNS = {"characters": (24, 100, 4e-3), "smollm-cut": (4, 30, 5e-4)}
"""Batch, steps and peak rate: near the best of quality_optim.py."""
INTERVALS = (1, 2, 3, 4)
BEST = "best"
LEAST_SIDE = 64
SAMPLED = 10


def best_share(u: Tensor, rank: int) -> float:
    gram = u.t() @ u if u.shape[1] <= u.shape[0] else u @ u.t()
    return (torch.linalg.eigvalsh(gram)[-rank:].sum() / gram.trace()).item()


def measure(name: str, data: Path, rank: int) -> dict[int | str, float]:
    """Share of momentum held, by interval."""
    batch, steps, lr = RUNS[name]
    task = load_task(name, data)
    model = task.model(0).float()
    optimizer = ternary(states="exact")(model, lr, "fp32", 0)
    matrices = [param for param in model.parameters() if param.dim() == 2 and min(param.shape) >= LEAST_SIDE]
    device = torch.device("cpu")
    bases = {
        (every, number): initial_basis(param.shape[1], rank, number, device)
        for every in INTERVALS
        for number, param in enumerate(matrices)
    }
    generator = torch.Generator().manual_seed(1000)
    shares: dict[int | str, list[float]] = defaultdict(list)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * rate_factor(step, steps)
        optimizer.zero_grad()
        task.loss(model, task.batch(batch, generator)).backward()
        optimizer.step()
        sampled = step % SAMPLED == SAMPLED - 1 and step >= steps // 2
        for number, param in enumerate(matrices):
            u = optimizer.state[param]["momentum"]
            for every in INTERVALS:
                basis = bases[every, number]
                projected = u @ basis.float()
                if sampled:
                    shares[every].append((projected.square().sum() / u.square().sum()).item())
                if step % every == 0:
                    bases[every, number] = next_basis(u.t() @ projected, basis)
            if sampled:
                shares[BEST].append(best_share(u, rank))
    return {every: statistics.mean(values) for every, values in shares.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the texts (see quality_optim.py)")
    parser.add_argument("--only", default=",".join(RUNS), help="tasks to run, separated by commas")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--rows", type=Path, help="another CSV file, for rehearsals")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.only.split(",")) - set(RUNS))
    if unknown:
        parser.error(f"no task {', '.join(unknown)}; there are {', '.join(RUNS)}")
    torch.set_num_threads(arguments.threads)
    rows = ResultRows("carry_basis", COLUMNS, arguments.rows)
    for name in arguments.only.split(","):
        batch, steps, lr = RUNS[name]
        key = {"task": name, "batch": batch, "steps": steps, "lr": lr, "rank": arguments.rank}
        if rows.has(every=BEST, **key):
            continue
        try:
            held = measure(name, arguments.data, arguments.rank)
        except MissingData as missing:
            print(f"skipped {name}: {missing}")
            continue
        for every in (*INTERVALS, BEST):
            row = rows.append(seed=0, every=every, share_held=held[every], of_the_best=held[every] / held[BEST], **key)
            print(f"{name:12} V every {every!s:>4} steps: {row['share_held']}, of the best {row['of_the_best']}")


if __name__ == "__main__":
    main()
