"""LOMO on bfloat16 weights: rounding to the nearest stalls, stochastic rounding does not.

    python benchmarks/lomo_rounding.py --data FOLDER [--threads 1]     # ten minutes on one core
    python benchmarks/lomo_rounding.py --summary [--plot docs/lomo_rounding.svg]
    python benchmarks/lomo_rounding.py --data FOLDER --steps 3 --rows /tmp/rehearsal.csv

A bfloat16 number has 8 bits: what changes a weight by less than 2^-9 of it is lost when the result is rounded to the
nearest. The 0.8 M-parameter character model of quality_optim.py trains from scratch on FOLDER/tinyshakespeare.txt with
`Lomo` in a fused backward, at rates a factor of 4 apart, its weights in
  fp32
  bf16, rounded stochastically (what Lomo does by itself)
  bf16, rounded to the nearest (``rounding="nearest"``)
The products are fp32 in all three (a bf16 weight is widened where it is used), so that rounding the weights, and their
gradients, is all that differs. The same weights at the start (rounded), the same batches, one seed; the rate rises over
a tenth of the steps and falls linearly to a tenth. One row a run in results/lomo_rounding.csv.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from quality.character import CharacterTask
from quality.summary import markdown
from quality.training import rate_factor
from rows import ResultRows
from torch import Tensor, nn
from torch.nn import functional

import leantune as lt

STEPS, BATCH, SEED = 150, 8, 0
RATES = (0.002, 0.008, 0.03125, 0.125, 0.5)
WEIGHTS: dict[str, tuple[torch.dtype, str | None]] = {
    "fp32": (torch.float32, None),
    "bf16, stochastic": (torch.bfloat16, "stochastic"),
    "bf16, nearest": (torch.bfloat16, "nearest"),
}
COLUMNS = ("weights", "lr", "steps", "batch", "start_loss", "validation_loss", "moved", "seconds")
"""``moved``: share of the weights that are not what they were at the start."""


class Widened(nn.Module):
    """``model`` with every weight as fp32 in the products; its gradient comes back in the weight's own dtype."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, ids: Tensor) -> Tensor:
        wide = {name: param.float() for name, param in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, wide, (ids,))


def train(task: CharacterTask, weights: str, lr: float, steps: int) -> dict[str, Any]:
    """One run; the row's own columns."""
    dtype, rounding = WEIGHTS[weights]
    # All three start from weights that bf16 holds.
    model = Widened(task.model(SEED).to(torch.bfloat16).to(dtype))
    begun = [param.detach().clone() for param in model.parameters()]
    start = task.evaluate(model).loss
    optimizer = lt.Lomo(model.named_parameters(), lr=lr, rounding=rounding, seed=SEED)
    fused = lt.FusedBackward(optimizer, model, clip="none")
    generator = torch.Generator().manual_seed(1000 + SEED)
    before = time.perf_counter()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * rate_factor(step, steps)
        ids, targets = task.batch(BATCH, generator)
        fused.backward(functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten()))
        optimizer.step()
    moved = sum(int((now != then).sum()) for now, then in zip(model.parameters(), begun, strict=True))
    return {
        "start_loss": start,
        "validation_loss": task.evaluate(model).loss,
        "moved": moved / sum(param.numel() for param in begun),
        "seconds": time.perf_counter() - before,
    }


def measure(rows: ResultRows, data: Path, steps: int) -> None:
    task = CharacterTask(data)
    for lr in RATES:
        for weights in WEIGHTS:
            key = {"weights": weights, "lr": lr, "steps": steps, "batch": BATCH}
            if not rows.has(**key):
                row = rows.append(seed=SEED, **key, **train(task, weights, lr, steps))
                print(
                    f"{weights:17} lr {lr:<8} loss {float(row['validation_loss']):.4f} {row['seconds']} s", flush=True
                )


def curves(rows: ResultRows, column: str) -> dict[str, list[float]]:
    """By kind of weights, ``column`` at each of the rates; raises ValueError where a run is missing."""
    found: dict[str, list[float]] = {}
    for weights in WEIGHTS:
        runs = [rows.find(weights=weights, lr=lr, steps=STEPS, batch=BATCH) for lr in RATES]
        if not all(runs):
            raise ValueError(f"{rows.path} lacks runs of {weights}: run the benchmark first (--data FOLDER)")
        found[weights] = [float(run[0][column]) for run in runs]
    return found


def summary(rows: ResultRows) -> str:
    """A Markdown table: held-out loss and share of weights moved, by rate and kind of weights."""
    losses, moved = curves(rows, "validation_loss"), curves(rows, "moved")
    lines = [
        [f"{lr:g}", *(f"{losses[weights][place]:.3f} ({100 * moved[weights][place]:.0f} %)" for weights in WEIGHTS)]
        for place, lr in enumerate(RATES)
    ]
    return markdown(["lr", *WEIGHTS], lines)


def plot(rows: ResultRows, file: Path) -> None:
    """Held-out loss, and the share of weights that moved, over the rate."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "lomo_rounding"  # the same rows give the same file
    from matplotlib import pyplot

    styles = {
        "fp32": ("tab:gray", "o", "-"),
        "bf16, stochastic": ("tab:blue", "s", "--"),
        "bf16, nearest": ("tab:red", "^", "-"),
    }
    figure, (loss_axis, moved_axis) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for weights, (colour, marker, line) in styles.items():
        style = {"color": colour, "marker": marker, "linestyle": line, "label": weights}
        style["linewidth"] = 4 if weights == "fp32" else 1.5  # the stochastic line lies on it
        loss_axis.plot(RATES, curves(rows, "validation_loss")[weights], **style)
        moved_axis.plot(RATES, [100 * share for share in curves(rows, "moved")[weights]], **style)
    start = curves(rows, "start_loss")["fp32"][0]
    loss_axis.axhline(start, color="grey", linewidth=1, linestyle=":")
    loss_axis.annotate("before training", (RATES[-1], start), ha="right", va="top", color="grey", fontsize=9)
    loss_axis.set_ylabel(f"held-out loss after {STEPS} steps")
    moved_axis.set_ylabel("weights that moved, %")
    moved_axis.set_ylim(0, 104)
    for axis in (loss_axis, moved_axis):
        axis.set_xscale("log")
        axis.set_xlabel("learning rate")
        axis.grid(alpha=0.3)
    loss_axis.legend(title="weights", frameon=False, loc="lower left")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with tinyshakespeare.txt")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run (other than the default: with --rows)")
    parser.add_argument("--rows", type=Path, help="another CSV file, for rehearsals")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--summary", action="store_true", help="print the table from the rows; nothing is run")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the figure from the rows")
    arguments = parser.parse_args()
    if arguments.steps != STEPS and arguments.rows is None:
        parser.error("--steps is for rehearsals: give --rows FILE, so that they stay out of the results")
    torch.set_num_threads(arguments.threads)
    rows = ResultRows("lomo_rounding", COLUMNS, arguments.rows)
    if not (arguments.summary or arguments.plot):
        if arguments.data is None:
            parser.error("--data FOLDER is needed to run anything")
        measure(rows, arguments.data, arguments.steps)
    if arguments.steps == STEPS:
        print(summary(rows))
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
