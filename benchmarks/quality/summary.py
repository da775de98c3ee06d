"""Tables from the rows: every method at its best rate, its seeds' mean and error, and its ratio to AdamW."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from rows import ResultRows

from quality.search import best_power
from quality.training import Cell, from_hex, rate

REFERENCE = "adamw"
RESAMPLED = 10_000
NOT_SEARCHED = " (not searched)"
HEADINGS = (
    "method", "lr", "validation loss", "seeds", "ratio to AdamW", "same seeds", "accuracy", "difference, 95 %",
    "state B/param",
)  # fmt: skip


@dataclass
class Entry:
    """One method on one cell, at the rate that was best with seed 0."""

    method: str
    lr: float
    note: str
    """Where the rate's neighbours were not both tried: what the table says about it."""
    losses: dict[int, float]
    """By seed."""
    state_bytes: float
    accuracies: list[float]
    correct: dict[int, list[bool]]

    @property
    def mean(self) -> float:
        return statistics.mean(self.losses.values())


def entry(rows: ResultRows, cell: Cell, method: str) -> Entry | None:
    power = best_power(rows, cell, method)
    if power is None:
        return None
    found = rows.find(task=cell.task, batch=cell.batch, steps=cell.steps, method=method, lr=rate(power))
    tried = {row["lr"] for row in rows.find(task=cell.task, batch=cell.batch, steps=cell.steps, method=method, seed=0)}
    return Entry(
        method,
        rate(power),
        _note(tried, power),
        {int(row["seed"]): float(row["validation_loss"]) for row in found},
        float(found[0]["state_bytes_per_parameter"]),
        [float(row["accuracy"]) for row in found if row["accuracy"]],
        {int(row["seed"]): from_hex(row["correct"]) for row in found if row["correct"]},
    )


def _note(tried: set[str], power: int) -> str:
    if len(tried) == 1:
        return NOT_SEARCHED
    return "" if all(f"{rate(near):.6g}" in tried for near in (power - 1, power + 1)) else " (not interior)"


def mean_and_error(values: Sequence[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return mean
    return f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}"


def paired_ratio(ours: Entry, reference: Entry) -> list[float]:
    """Loss over AdamW's with the same seed, so the same weights at the start and the same batches."""
    return [loss / reference.losses[seed] for seed, loss in ours.losses.items() if seed in reference.losses]


def accuracy_difference(ours: Entry, reference: Entry) -> str:
    """Points above AdamW's accuracy with a paired bootstrap's 95 % interval over held-out examples (seeds pooled)."""
    seeds = [seed for seed in ours.correct if seed in reference.correct]
    if not seeds:
        return ""
    gaps = torch.stack(
        [torch.tensor(ours.correct[seed]).float() - torch.tensor(reference.correct[seed]).float() for seed in seeds]
    ).mean(0)
    generator = torch.Generator().manual_seed(0)
    means = torch.stack(
        [
            gaps[torch.randint(0, len(gaps), (250, len(gaps)), generator=generator)].mean(dim=1)
            for _ in range(RESAMPLED // 250)
        ]
    ).flatten()
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975])).tolist()
    return f"{100 * gaps.mean():+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def cell_table(rows: ResultRows, cell: Cell, methods: Iterable[str]) -> list[list[str]]:
    """Lines of cells as text, best first; empty if nothing was run."""
    entries = [found for method in methods if (found := entry(rows, cell, method)) is not None]
    reference = next((item for item in entries if item.method == REFERENCE), None)
    lines = []
    for item in sorted(entries, key=lambda item: item.mean):
        ratio = same = difference = ""
        if reference is not None:
            ratio = f"{item.mean / reference.mean:.4f}"
            same = mean_and_error(paired_ratio(item, reference), 4)
            difference = accuracy_difference(item, reference) if item is not reference else ""
        lines.append(
            [
                item.method,
                f"{item.lr:.3g}{item.note}",
                mean_and_error(list(item.losses.values()), 4),
                str(len(item.losses)) if len(item.losses) > 1 else "one seed",
                ratio,
                same,
                f"{100 * statistics.mean(item.accuracies):.1f} %" if item.accuracies else "",
                difference,
                f"{item.state_bytes:.3f}",
            ]
        )
    return lines


def overview(rows: ResultRows, cells: Sequence[Cell], methods: Iterable[str]) -> list[list[str]]:
    """Over the cells where a method's own rate was searched: geometric mean and worst of its ratio to AdamW with the
    same seeds, how often it is at or below AdamW, and how often at most 0.3 % above."""
    lines = []
    for method in methods:
        ratios = []
        for cell in cells:
            ours, reference = entry(rows, cell, method), entry(rows, cell, REFERENCE)
            if ours is not None and reference is not None and ours.note != NOT_SEARCHED:
                ratios.append(statistics.mean(paired_ratio(ours, reference)))
        if ratios and method != REFERENCE:
            lines.append(
                [
                    method,
                    f"{math.exp(statistics.mean(map(math.log, ratios))):.4f}",
                    f"{max(ratios):.4f}",
                    f"{sum(ratio <= 1 for ratio in ratios)} of {len(ratios)}",
                    f"{sum(ratio <= 1.003 for ratio in ratios)} of {len(ratios)}",
                ]
            )
    return sorted(lines, key=lambda line: float(line[1]))


def markdown(headings: Sequence[str], lines: list[list[str]]) -> str:
    """A Markdown table, padded so that it reads as text too; columns that are empty throughout are left out."""
    used = [place for place in range(len(headings)) if any(line[place] for line in lines)]
    table = [[line[place] for place in used] for line in [list(headings), *lines]]
    widths = [max(len(line[place]) for line in table) for place in range(len(used))]
    padded = ["| " + " | ".join(text.ljust(width) for text, width in zip(line, widths)) + " |" for line in table]
    return "\n".join([padded[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *padded[1:]])


def print_summary(rows: ResultRows, cells: Sequence[Cell], smoke: set[str], methods: Sequence[str]) -> None:
    """``smoke``: the tasks that are smoke tests: named so, and left out of the overview."""
    for cell in cells:
        lines = cell_table(rows, cell, methods)
        if lines:
            note = " (a smoke test: one seed)" if cell.task in smoke else ""
            print(f"\n### {cell.task}, batch {cell.batch}, {cell.steps} steps{note}\n\n{markdown(HEADINGS, lines)}")
    lines = overview(rows, [cell for cell in cells if cell.task not in smoke], methods)
    if lines:
        headings = ("method", "loss / AdamW's, geometric mean", "worst", "at or below AdamW", "at most 0.3 % above")
        print(f"\n### Over all tasks and batch sizes\n\n{markdown(headings, lines)}")
