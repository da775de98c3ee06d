"""One training run: warm-up, linear decay, and the columns of its row."""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from leantune.errors import NonFiniteError
from quality.methods import Build, set_rate, state_bytes
from quality.task import Task

WARMUP_SHARE = 0.1
FINAL_SHARE = 0.1
COLUMNS = (
    "task", "batch", "method", "lr", "steps", "stage", "validation_loss", "accuracy", "state_bytes_per_parameter",
    "threads", "seconds", "cpu_seconds", "first_step_seconds", "evaluation_seconds", "correct",
)  # fmt: skip
"""``cpu_seconds``: the process's own, without the evaluation; measured on the steps after the first, in which torchao
compiles, and scaled to all. ``correct``: whether each held-out example was right, as `to_hex` writes it."""


@dataclass(frozen=True)
class Cell:
    """A task at a batch size."""

    task: str
    batch: int
    steps: int
    power: int
    """The search for AdamW's rate starts at 1e-3 * 2^power."""
    seeds: int = 3
    searched: tuple[str, ...] | None = None
    """Methods with a search of their own; None: all."""
    fixed: tuple[str, ...] = ()
    """Methods run once, at AdamW's best rate (and their own offset from it)."""


def rate(power: int) -> float:
    """The grid of learning rates: 1e-3 times powers of 2."""
    return 1e-3 * 2.0**power


def rate_factor(number: int, steps: int) -> float:
    """Share of the peak rate in step ``number`` (from 0): a linear rise, then a linear fall to a tenth."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    if number < warmup:
        return (number + 1) / warmup
    return 1.0 - (1.0 - FINAL_SHARE) * (number - warmup) / max(1, steps - warmup)


def train(task: Task, cell: Cell, build: Build, lr: float, seed: int, judge: bool = True) -> dict[str, Any]:
    """Trains once and judges (rehearsals need not).

    A loss or gradient that is not finite ends the run with a loss of infinity.
    """
    start = time.perf_counter()
    model = task.model(seed)
    optimizer = build(model, lr, task.weights, seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    finite, marks = True, [time.process_time()]
    for number in range(cell.steps):
        set_rate(optimizer, lr * rate_factor(number, cell.steps))
        loss = task.loss(model, task.batch(cell.batch, generator))
        optimizer.zero_grad()
        loss.backward()
        try:
            optimizer.step()
        except NonFiniteError:
            finite = False
        marks.append(time.process_time())
        finite = finite and math.isfinite(loss.item())
        if not finite:
            break
    later = marks[2:] or marks[1:]
    per_step = (later[-1] - marks[-len(later) - 1]) / len(later)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    row: dict[str, Any] = {
        "validation_loss": float("inf") if judge else float("nan"),
        "state_bytes_per_parameter": state_bytes(optimizer) / parameters,
        "threads": torch.get_num_threads(),
        "cpu_seconds": per_step * cell.steps,
        "first_step_seconds": marks[1] - marks[0],
    }
    if finite and judge:
        model.eval()
        before = time.process_time()
        judged = task.evaluate(model)
        row["evaluation_seconds"] = time.process_time() - before
        if math.isfinite(judged.loss):
            row["validation_loss"] = judged.loss
        if judged.correct is not None:
            row |= {"accuracy": judged.accuracy, "correct": to_hex(judged.correct.tolist())}
    return row | {"seconds": time.perf_counter() - start}


def to_hex(bits: list[bool]) -> str:
    """ "5:f8" for five ones: how many bits, then digits of four, zeros filling the last one."""
    padded = [*bits, *[False] * (-len(bits) % 4)]
    digits = (padded[place : place + 4] for place in range(0, len(padded), 4))
    text = "".join(f"{sum(bit << (3 - place) for place, bit in enumerate(digit)):x}" for digit in digits)
    return f"{len(bits)}:{text}"


def from_hex(text: str) -> list[bool]:
    """The bits of `to_hex`."""
    count, _, digits = text.partition(":")
    return [bool(int(digit, 16) >> (3 - place) & 1) for digit in digits for place in range(4)][: int(count)]
