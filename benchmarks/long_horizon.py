"""Do ternary states drift away from AdamW over thousands of steps?

    python benchmarks/long_horizon.py --data FOLDER [--only characters,llama] [--methods adamw,ternary-r4] [--threads 1]
    python benchmarks/long_horizon.py --summary [--plot FILE.svg]

Tasks (a) and (b) of quality_optim.py, 5,000 steps at its small batch, the same rate and batches for both: a rise over
100 steps, constant to step 4,000, a linear fall to a tenth. A row of results/long_horizon.csv every 250 steps, written
when the run is over:
  train_loss, validation_loss    mean of the batches since the last row; held out
and, of the ternary run, how its weights moved since the last row, against what two exact optimizers would have added up
to on the very same gradients, over all matrices:
  cosine, norm_ratio             ... its own rule with exact states (LaProp)
  cosine_adamw, norm_ratio_adamw ... AdamW
  cosine_n                       of g / sqrt(v) by the stored v to that by the exact v, signs of g drawn at random
  median_log_step                octaves between neighbouring levels of the stored v
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from quality.methods import BETAS, METHODS, WEIGHT_DECAY
from quality.task import MissingData
from quality.tasks import load_task
from rows import ResultRows
from torch import Tensor, nn
from torch.nn import functional

from leantune.codec.ternary_state import TernaryState
from leantune.codec.tiles import BlockGrid, Tile

STEPS, EVERY = 5000, 250
BATCHES = {"characters": 16, "llama": 12}
RATE = 2e-3
RUNS = ("adamw", "ternary-r4")
COLUMNS = (
    "task", "batch", "method", "lr", "steps", "step", "train_loss", "validation_loss", "cosine", "norm_ratio",
    "cosine_adamw", "norm_ratio_adamw", "cosine_n", "median_log_step",
)  # fmt: skip


def rate(step: int) -> float:
    """The rate in a step, from 0."""
    rise, fall = min(1.0, (step + 1) / 100), max(0.0, (step - 4000) / (STEPS - 4000))
    return RATE * rise * (1 - 0.9 * fall)


class Beside:
    """What LaProp and AdamW, with exact states, would have moved a ternary run's matrices by, on its own gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.params = [param for group in optimizer.param_groups for param in group["params"] if param.dim() == 2]
        self.variance = [torch.zeros_like(param) for param in self.params]
        self.laprop = [torch.zeros_like(param) for param in self.params]
        self.momentum = [torch.zeros_like(param) for param in self.params]
        self.step = 0
        self.restart()

    def restart(self) -> None:
        self.start = [param.detach().clone() for param in self.params]
        self.sums = [[torch.zeros_like(param) for param in self.params] for _ in range(2)]

    def observe(self, lr: float) -> None:
        """Before the optimizer's step."""
        self.step += 1
        beta1, beta2 = BETAS
        for i, param in enumerate(self.params):
            grad = param.grad
            self.variance[i].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            root = (self.variance[i] / (1 - beta2**self.step)).sqrt_().add_(1e-8)
            self.laprop[i].lerp_(grad / root, 1 - beta1)
            self.momentum[i].lerp_(grad, 1 - beta1)
            adamw = self.momentum[i] / root / (1 - beta1**self.step)
            for sums, moved in zip(self.sums, (self.laprop[i], adamw), strict=True):
                sums[i].add_(moved + WEIGHT_DECAY * param.detach(), alpha=-lr)

    def compare(self) -> dict[str, float]:
        moved = _flat([param.detach() - start for param, start in zip(self.params, self.start, strict=True)])
        result = {}
        for suffix, sums in zip(("", "_adamw"), self.sums, strict=True):
            other = _flat(sums)
            result[f"cosine{suffix}"] = functional.cosine_similarity(moved, other, dim=0).item()
            result[f"norm_ratio{suffix}"] = (moved.norm() / other.norm()).item()
        cosines, log_steps = [], []
        for param, exact in zip(self.params, self.variance, strict=True):
            state = self.optimizer.state[param]
            if "variance_trits" not in state:
                continue
            rows, cols = param.shape
            grid = BlockGrid(cols, 128, torch.device("cpu"))
            stored = grid.join(TernaryState(state, 128).variance(Tile(0, rows, 0, cols), grid)[0])
            root = exact.sqrt()
            # n by the exact v is +-1 where there was a gradient; by the stored v it is root / sqrt(stored).
            ours, truth = root / stored.sqrt().clamp_(min=1e-20), (root > 0).float()
            cosines.append(functional.cosine_similarity(ours.flatten(), truth.flatten(), dim=0).item())
            log_steps.append(state["variance_step"].float().flatten())
        self.restart()
        return result | {
            "cosine_n": statistics.mean(cosines),
            "median_log_step": torch.cat(log_steps).median().item(),
        }


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors]).double()


def run(name: str, method: str, data: Path) -> list[dict[str, Any]]:
    task = load_task(name, data)
    model: nn.Module = task.model(0)
    optimizer = METHODS[method].build(model, RATE, task.weights, 0)
    beside = Beside(optimizer) if method != "adamw" else None
    generator = torch.Generator().manual_seed(1000)
    measured, losses = [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        loss = task.loss(model, task.batch(BATCHES[name], generator))
        optimizer.zero_grad()
        loss.backward()
        if beside is not None:
            beside.observe(rate(step))
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % EVERY == 0:
            row = {
                "step": step + 1,
                "train_loss": statistics.mean(losses),
                "validation_loss": task.evaluate(model).loss,
            }
            row |= beside.compare() if beside is not None else {}
            print(name, method, row, flush=True)
            measured.append(row)
            losses = []
    return measured


def summary(rows: ResultRows) -> None:
    for name in BATCHES:
        curves = {method: rows.find(task=name, method=method) for method in RUNS}
        if not all(curves.values()):
            continue
        adamw, ternary = curves.values()
        print(f"\n{name}: {STEPS} steps\n")
        headings = ("step", "AdamW", "ternary", "ratio", *COLUMNS[8:])
        print("| " + " | ".join(headings) + " |\n|" + "---|" * len(headings))
        for theirs, mine in zip(adamw, ternary, strict=True):
            if int(mine["step"]) % 1000 and mine["step"] != str(EVERY):
                continue
            ratio = float(mine["validation_loss"]) / float(theirs["validation_loss"])
            shown = [mine["step"], theirs["validation_loss"], mine["validation_loss"], f"{ratio:.4f}"]
            print("| " + " | ".join([*shown, *(mine[column] for column in COLUMNS[8:])]) + " |")


def plot(rows: ResultRows, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(BATCHES), figsize=(10, 6), sharex=True, squeeze=False)
    for (name, batch), (above, below) in zip(BATCHES.items(), axes.T, strict=True):
        for method, colour in zip(RUNS, ("tab:gray", "tab:blue"), strict=True):
            found = rows.find(task=name, method=method)
            steps = [int(row["step"]) for row in found]
            for kind, style in (("train_loss", ":"), ("validation_loss", "-")):
                label = f"{method}, {kind.removesuffix('_loss')}"
                above.plot(steps, [float(row[kind]) for row in found], style, color=colour, label=label)
        for column, label in (
            ("cosine", "cosine to exact states"),
            ("norm_ratio", "norm ratio to exact states"),
            ("cosine_adamw", "cosine to AdamW"),
            ("cosine_n", "cosine of n"),
            ("median_log_step", "median log-step, octaves"),
        ):
            below.plot(steps, [float(row[column]) for row in found], label=label)
        above.set_title(f"{name}, batch {batch}")
        above.set_ylabel("loss")
        below.set_xlabel("step")
        below.set_ylim(0, 1.3)
        above.legend()
        below.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with the texts (see quality_optim.py)")
    parser.add_argument("--only", default=",".join(BATCHES), help="tasks to run, separated by commas")
    parser.add_argument("--methods", default=",".join(RUNS), help="methods to run, separated by commas")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=Path, help="another CSV file, for rehearsals")
    parser.add_argument("--steps", type=int, help="fewer steps, for rehearsals (with --rows)")
    parser.add_argument("--summary", action="store_true", help="print the tables from the rows and stop")
    parser.add_argument("--plot", type=Path, help="draw the curves, as SVG")
    arguments = parser.parse_args()
    unknown = sorted({*arguments.only.split(","), *arguments.methods.split(",")} - {*BATCHES, *RUNS})
    if unknown:
        parser.error(f"no task or method {', '.join(unknown)}; tasks: {', '.join(BATCHES)}; methods: {', '.join(RUNS)}")
    if arguments.steps is not None:
        if arguments.rows is None:
            parser.error("--steps is for rehearsals: give --rows FILE, so that they stay out of the results")
        global STEPS, EVERY
        STEPS, EVERY = arguments.steps, max(1, arguments.steps // 2)
    torch.set_num_threads(arguments.threads)
    rows = ResultRows("long_horizon", COLUMNS, arguments.rows)
    if not arguments.summary:
        if arguments.data is None:
            parser.error("--data FOLDER is needed to run anything")
        for name in arguments.only.split(","):
            for method in arguments.methods.split(","):
                key = {"task": name, "batch": BATCHES[name], "method": method, "lr": RATE, "steps": STEPS}
                if rows.has(step=STEPS, **key):
                    continue
                try:
                    measured = run(name, method, arguments.data)
                except MissingData as missing:
                    print(f"skipped {name}: {missing}")
                    break
                for row in measured:
                    rows.append(seed=0, **key, **row)
    summary(rows)
    if arguments.plot is not None:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
