"""The evidence under everything: does the ternary scheme train as well as AdamW on a character model?

    python benchmarks/first_look.py PATH/TO/tinyshakespeare.txt [--only batch24,batch96,wide,formats,long]

About 0.8 M parameters (4 layers, width 128), Tiny Shakespeare (public-domain text, 1.1 MB), context 64. The rate warms
up over 25 steps and then falls linearly to a tenth; "long" keeps it constant, which is the
harder test for a scheme whose weights jitter around the smooth path.
Methods: torch AdamW, TernaryAdamW without carry, with a carry of rank 4. For each (part, method) the learning rate
grid is extended until the best is interior, then three seeds run at the best. One row a run in
results/first_look.csv; a run whose row exists is not repeated. ``--summary`` prints the tables from the rows.
"""

import argparse
import math
import statistics
import time
from pathlib import Path

import torch
from quality.character import CharacterModel, Text
from rows import ResultRows
from torch import Tensor, nn
from torch.nn import functional

import leantune as lt
from leantune.codec.counter_hash import low_fraction, random_bits, stream_key
from leantune.codec.ternary_state import TernaryState
from leantune.codec.tiles import BlockGrid, Tile
from leantune.kernels.half_linear import use_fp32_products

WARMUP = 25
FINAL_SHARE = 0.1
METHODS = ("adamw", "ternary_r0", "ternary_r4")
GRID = [2.5e-4 * 2**power for power in range(10)]
START = 8e-3
LONG_RATE = 4e-3
COLUMNS = (
    "part", "method", "width", "batch", "steps", "weights", "beta2", "lr", "validation_loss", "seconds",
    "median_log_step", "cosine_n", "cosine_block_mean",
)  # fmt: skip
PARTS = {
    # part: (width, batch, steps, weights, beta2, methods)
    "batch24": (128, 24, 200, "fp32", 0.999, METHODS),
    "batch96": (128, 96, 120, "fp32", 0.999, METHODS),
    "wide24": (256, 24, 120, "fp32", 0.999, ("adamw", "ternary_r4")),
    "wide96": (256, 96, 80, "fp32", 0.999, ("adamw", "ternary_r4")),
    "bf16": (128, 24, 200, "bf16", 0.999, ("adamw", "ternary_r4")),
    "bf16+8": (128, 24, 200, "bf16+8", 0.999, ("adamw", "ternary_r4")),
    "long": (128, 12, 3000, "fp32", 0.999, ("adamw", "ternary_r4")),
}


def build_optimizer(
    method: str, model: nn.Module, lr: float, beta2: float, weights: str, seed: int
) -> torch.optim.Optimizer:
    """AdamW is torch's own on fp32 weights. On bf16 weights that would stall by rounding: ours, with fp32 states."""
    master = 24 if weights == "bf16+8" else None
    if method == "adamw":
        if weights == "fp32":
            return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, beta2), weight_decay=0.01)
        return lt.AdamW(model.parameters(), lr=lr, betas=(0.9, beta2), weight_decay=0.01, master_bits=master, seed=seed)
    rank = int(method.removeprefix("ternary_r"))
    return lt.TernaryAdamW(
        model.parameters(), lr=lr, betas=(0.9, beta2), weight_decay=0.01, carry_rank=rank, master_bits=master, seed=seed
    )


def rate_factor(number: int, steps: int, constant: bool) -> float:
    """Share of the peak rate in step ``number`` (from 0)."""
    if number < WARMUP:
        return (number + 1) / WARMUP
    return 1.0 if constant else 1.0 - (1.0 - FINAL_SHARE) * (number - WARMUP) / (steps - WARMUP)


def run(text: Text, part: str, method: str, lr: float, seed: int) -> dict[str, float]:
    """One training run; returns the row's measured columns."""
    width, batch, steps, weights, beta2, _ = PARTS[part]
    torch.manual_seed(seed)
    model = CharacterModel(text.vocabulary, width)
    if weights != "fp32":
        model = model.bfloat16()
        use_fp32_products(model)
    optimizer = build_optimizer(method, model, lr, beta2, weights, seed)
    probe = ExactVariance(model, beta2) if part == "long" and method != "adamw" else None
    generator = torch.Generator().manual_seed(1000 + seed)
    start = time.perf_counter()
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * rate_factor(number, steps, constant=part == "long")
        ids, targets = text.batch(batch, generator)
        loss = functional.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        if probe is not None:
            probe.observe()
        optimizer.step()
    result = {"validation_loss": text.validation_loss(model), "seconds": time.perf_counter() - start}
    if not math.isfinite(result["validation_loss"]):
        result["validation_loss"] = float("inf")
    return result | (probe.compare(optimizer, steps) if probe is not None else {})


class ExactVariance:
    """Follows one matrix's exact second moment beside the ternary one: cosine of g / sqrt(v) under each against the
    exact v."""

    def __init__(self, model: nn.Module, beta2: float) -> None:
        self.parameter = model.blocks[1].up.weight
        self.beta2 = beta2
        self.variance = torch.zeros_like(self.parameter)

    def observe(self) -> None:
        grad = self.parameter.grad
        self.variance.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)

    def compare(self, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, float]:
        rows, cols = self.parameter.shape
        state, grid = optimizer.state[self.parameter], BlockGrid(cols, 128, torch.device("cpu"))
        decoded, _ = TernaryState(state, 128).variance(Tile(0, rows, 0, cols), grid)
        noise = low_fraction(random_bits(stream_key(0, steps, 0), 0, rows, 0, grid.blocks, 128, torch.device("cpu")))
        # Gradients drawn from the exact second moment itself: the last batch's alone would compare one sample.
        sample = grid.split(self.variance).sqrt() * (noise - 0.5).sign()
        exact = grid.split(self.variance)
        mean = exact.mean(dim=-1, keepdim=True).expand_as(exact)

        def cosine(variance: Tensor) -> float:
            ours, truth = (sample / (v.sqrt() + 1e-12) for v in (variance, exact))
            return functional.cosine_similarity(ours.flatten(), truth.flatten(), dim=0).item()

        log_steps = [s["variance_step"].float().flatten() for s in optimizer.state.values() if "variance_step" in s]
        return {
            "median_log_step": torch.cat(log_steps).median().item(),
            "cosine_n": cosine(decoded),
            "cosine_block_mean": cosine(mean),
        }


def search(text: Text, rows: ResultRows, part: str, method: str) -> float:
    """The grid's best learning rate with seed 0, extended until both neighbours are worse."""
    losses: dict[float, float] = {}

    def loss(lr: float) -> float:
        if lr not in losses:
            losses[lr] = float(ensure(text, rows, part, method, lr, 0)["validation_loss"])
        return losses[lr]

    place = GRID.index(START)
    while True:
        neighbours = [spot for spot in (place - 1, place, place + 1) if 0 <= spot < len(GRID)]
        best = min(neighbours, key=lambda spot: loss(GRID[spot]))
        if best == place:
            return GRID[place]
        place = best


def ensure(text: Text, rows: ResultRows, part: str, method: str, lr: float, seed: int) -> dict[str, str]:
    found = rows.find(part=part, method=method, lr=lr, seed=seed)
    if found:
        return found[0]
    width, batch, steps, weights, beta2, _ = PARTS[part]
    result = run(text, part, method, lr, seed)
    print(f"{part:8} {method:11} lr {lr:.2e} seed {seed}: {result}", flush=True)
    return rows.append(
        seed=seed,
        part=part,
        method=method,
        width=width,
        batch=batch,
        steps=steps,
        weights=weights,
        beta2=beta2,
        lr=lr,
        **result,
    )


def summary(rows: ResultRows) -> None:
    """Mean and standard error of the seeds at each method's best lr, and the ratio to AdamW's mean."""
    for part in PARTS:
        means: dict[str, float] = {}
        for method in METHODS:
            found = rows.find(part=part, method=method)
            rates: dict[str, list[float]] = {}
            for row in found:
                rates.setdefault(row["lr"], []).append(float(row["validation_loss"]))
            most = max((len(losses) for losses in rates.values()), default=0)
            if most == 0:
                continue
            lr, losses = min(
                ((r, x) for r, x in rates.items() if len(x) == most), key=lambda item: statistics.mean(item[1])
            )
            means[method] = statistics.mean(losses)
            error = statistics.stdev(losses) / most**0.5 if most > 1 else float("nan")
            ratio = means[method] / means.get("adamw", float("nan"))
            print(
                f"{part:8} {method:11} lr {lr:>8}  {means[method]:.4f} +- {error:.4f} ({most} seeds)  {ratio:.4f} of "
                f"AdamW"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="path of tinyshakespeare.txt")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, in order, separated by commas")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods to run, separated by commas")
    parser.add_argument("--summary", action="store_true", help="print the tables from the rows and stop")
    arguments = parser.parse_args()
    rows = ResultRows("first_look", COLUMNS)
    if not arguments.summary:
        text = Text(arguments.text)
        for part in arguments.only.split(","):
            for method in PARTS[part][5]:
                if method not in arguments.methods.split(","):
                    continue
                lr = search(text, rows, part, method) if part != "long" else LONG_RATE
                for seed in range(3 if part != "long" else 1):
                    ensure(text, rows, part, method, lr, seed)
    summary(rows)


if __name__ == "__main__":
    main()
