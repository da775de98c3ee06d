"""Learning-rate search and seeds, over rows that are measured once."""

from typing import Any

from rows import ResultRows

from quality.methods import METHODS, PEERS, Build
from quality.task import Task
from quality.training import Cell, rate, train

SEEDS = 3
STRONGEST = 3
MOST_RATES = 9
"""A search that has tried this many rates stops where it is, and says so."""


class Study:
    """Runs of one benchmark's methods (name -> constructor) on its cells, each looked up before it is run."""

    def __init__(self, rows: ResultRows, builds: dict[str, Build]) -> None:
        self.rows, self.builds = rows, builds

    def ensure(
        self, task: Task, cell: Cell, method: str, lr: float, seed: int, stage: str, judge: bool = True
    ) -> dict[str, str]:
        """The row of this run, run now if it is not there."""
        found = self.rows.find(task=cell.task, batch=cell.batch, steps=cell.steps, method=method, lr=lr, seed=seed)
        if found:
            return found[0]
        result = self.train(task, cell, method, lr, seed, judge)
        row = self.rows.append(
            seed=seed,
            task=cell.task,
            batch=cell.batch,
            method=method,
            lr=lr,
            steps=cell.steps,
            stage=stage,
            **result,
        )
        accuracy = f" accuracy {float(row['accuracy']):.3f}" if row["accuracy"] else ""
        print(
            f"{cell.task:11} batch {cell.batch:<4} {method:14} lr {lr:.2e} seed {seed} {stage:6} "
            f"loss {float(row['validation_loss']):.4f}{accuracy} {float(row['seconds']):.0f} s",
            flush=True,
        )
        return row

    def train(self, task: Task, cell: Cell, method: str, lr: float, seed: int, judge: bool) -> dict[str, Any]:
        """One run: the columns of its row that it measures."""
        return train(task, cell, self.builds[method], lr, seed, judge)

    def search(self, task: Task, cell: Cell, method: str, start: int) -> int:
        """The grid's best power with seed 0, extended until both neighbours are worse."""
        losses: dict[int, float] = {}

        def loss(power: int) -> float:
            if power not in losses:
                losses[power] = float(self.ensure(task, cell, method, rate(power), 0, "search")["validation_loss"])
            return losses[power]

        place = start
        while True:
            # Of equals (all infinite) the lower, so that a search that starts too high comes down.
            best = min((place - 1, place, place + 1), key=lambda power: (loss(power), power))
            if best == place:
                return place
            place = best
            if len(losses) >= MOST_RATES:
                print(f"{cell.task} batch {cell.batch} {method}: no interior best in {MOST_RATES} rates", flush=True)
                return place

    def seeds(self, task: Task, cell: Cell, method: str, power: int, count: int = SEEDS) -> None:
        for seed in range(1, count):
            self.ensure(task, cell, method, rate(power), seed, "seed")


def best_power(rows: ResultRows, cell: Cell, method: str) -> int | None:
    """The power with the lowest seed-0 loss in the rows; None where there are none."""
    found = rows.find(task=cell.task, batch=cell.batch, steps=cell.steps, method=method, seed=0)
    by_rate = {row["lr"]: float(row["validation_loss"]) for row in found}
    if not by_rate:
        return None
    best = min(by_rate, key=lambda lr: by_rate[lr])
    return next(power for power in range(-30, 31) if f"{rate(power):.6g}" == best)


def strongest_peers(rows: ResultRows, cell: Cell, count: int = STRONGEST) -> list[str]:
    """The peers with the lowest loss in the search."""
    losses = {}
    for method in PEERS:
        found = rows.find(task=cell.task, batch=cell.batch, steps=cell.steps, method=method, seed=0)
        if found:
            losses[method] = min(float(row["validation_loss"]) for row in found)
    return sorted(losses, key=lambda method: losses[method])[:count]


def start_power(rows: ResultRows, cell: Cell, method: str) -> int:
    """Where a method's search begins: at AdamW's best where that is known, plus the method's own offset."""
    if method == "adamw":
        return cell.power
    known = best_power(rows, cell, "adamw")
    return (cell.power if known is None else known) + METHODS[method].offset
