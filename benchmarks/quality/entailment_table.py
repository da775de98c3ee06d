"""The table of quality_rte.py: memory by part, speed, held-out loss and accuracy, each method against AdamW."""

import base64
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from rows import ResultRows
from torch import Tensor

from leantune.memory.sizes import MIB
from quality.entailment import Judged
from quality.summary import markdown, mean_and_error
from quality.training import from_hex

REFERENCE, ZERO_SHOT = "adamw", "zero-shot"
PARTS = ("parameters", "gradients", "states", "activations", "peak")
"""Columns ``<part>_bytes`` of a row."""
RESAMPLED = 10_000


@dataclass
class Entry:
    """The final runs of a method."""

    method: str
    lr: float
    interior: bool
    rows: dict[int, dict[str, str]]
    """By seed."""

    def values(self, column: str) -> list[float]:
        return [float(row[column]) for row in self.rows.values() if row[column]]

    def judged(self, seed: int) -> Judged:
        row = self.rows[seed]
        losses = torch.frombuffer(bytearray(base64.b64decode(row["losses"])), dtype=torch.float16).float()
        return Judged(losses, torch.tensor(from_hex(row["correct"])))


def entry(rows: ResultRows, method: str) -> Entry | None:
    found = rows.find(method=method, stage="final")
    if not found:
        return None
    tried = {row["lr"]: float(row["held_out_loss"]) for row in rows.find(method=method, stage="search")}
    best = min(tried, key=lambda lr: tried[lr], default="")
    ordered = sorted(map(float, tried))
    return Entry(
        method,
        float(found[0]["lr"]),
        not tried or ordered[0] < float(best) < ordered[-1],
        {int(row["seed"]): row for row in found},
    )


def paired_difference(ours: Sequence[Tensor], reference: Sequence[Tensor]) -> tuple[float, float, float]:
    """Mean of ours minus the reference over held-out rows, with a bootstrap's 95 % interval.

    One vector (rows) a seed, paired by row and, in order, by seed; seeds are averaged before rows are drawn again.
    """
    gaps = torch.stack([one.float() - other.float() for one, other in zip(ours, reference, strict=True)]).mean(0)
    generator = torch.Generator().manual_seed(0)
    drawn = [gaps[torch.randint(len(gaps), (250, len(gaps)), generator=generator)] for _ in range(RESAMPLED // 250)]
    low, high = torch.quantile(torch.cat([part.mean(1) for part in drawn]), torch.tensor([0.025, 0.975])).tolist()
    return gaps.mean().item(), low, high


def against(ours: Entry, reference: Entry) -> tuple[str, str]:
    """Differences of held-out loss and of accuracy (points) with their intervals."""
    if ours.method == ZERO_SHOT:  # one model for all seeds
        pairs = [(ours.judged(0), reference.judged(seed)) for seed in reference.rows]
    else:
        pairs = [(ours.judged(seed), reference.judged(seed)) for seed in ours.rows if seed in reference.rows]
    if ours is reference or not pairs:
        return "", ""
    loss = paired_difference([a.losses for a, _ in pairs], [b.losses for _, b in pairs])
    points = [100 * v for v in paired_difference([a.correct for a, _ in pairs], [b.correct for _, b in pairs])]
    return (
        f"{loss[0]:+.3f} ({loss[1]:+.3f} to {loss[2]:+.3f})",
        f"{points[0]:+.1f} ({points[1]:+.1f} to {points[2]:+.1f})",
    )


def table(rows: ResultRows, methods: Iterable[str]) -> str:
    """Every method with final runs, in the order given."""
    entries = [found for method in methods if (found := entry(rows, method)) is not None]
    reference = next((item for item in entries if item.method == REFERENCE), None)
    headings = [
        "method", "lr", "seeds", *(f"{part} MiB" for part in PARTS), "tokens/s", "held-out loss", "accuracy %",
        "loss less AdamW's, 95 %", "accuracy less AdamW's, 95 %",
    ]  # fmt: skip
    lines = []
    for item in entries:
        sizes = [item.values(f"{part}_bytes") for part in PARTS]
        speed = item.values("tokens_per_second")
        lines.append(
            [
                item.method,
                (f"{item.lr:.3g}" if item.lr else "") + ("" if item.interior else " (not interior)"),
                "" if item.method == ZERO_SHOT else str(len(item.rows)) if len(item.rows) > 1 else "one seed",
                *(f"{max(size) / MIB:.0f}" if size else "" for size in sizes),
                f"{statistics.median(speed):.0f}" if speed else "",
                mean_and_error(item.values("held_out_loss"), 3),
                mean_and_error([100 * value for value in item.values("accuracy")], 1),
                *(against(item, reference) if reference is not None else ("", "")),
            ]
        )
    return markdown(headings, lines)
