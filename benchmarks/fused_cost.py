"""What a fused backward costs in time: steps of the same model with an ordinary backward, one-pass, and two-pass.

    python benchmarks/fused_cost.py [--rounds 5] [--length 256] [--threads 2]

SmolLM2-135M (the folder that ``leantune demo`` keeps), bf16 weights, the loss without logits, `TernaryAdamW` (whose
update is short, so that the backward is compared), one row of ``--length`` tokens a step; with and without
checkpointing.
All sides run in one process, one step of each a round; a row of results/fused_cost.csv is a median over the rounds, and
``speed_ratio`` the median of the rounds' own ratios of tokens/s to the ordinary step's.
  ordinary    loss.backward(); optimizer.step(); zero_grad()
  none, per_tensor   FusedBackward in one pass
  global      FusedBackward in two passes over one forward, with exact clipping
  global-kept   the same, the first pass keeping half of the bytes of all gradients
And the cost of the hooks themselves: 1,000 matrices of 32 x 32, fused (no clipping) less ordinary, as a share of the
ordinary SmolLM2 step without checkpointing.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from quality.smollm import SmolTask
from quality.task import MissingData
from rows import ResultRows
from torch import Tensor, nn

import leantune as lt
from leantune.memory.traced.trace import exact_loss, token_batch

COLUMNS = ("side", "checkpointing", "length", "threads", "rounds", "median_ms", "speed_ratio", "ratio_min", "ratio_max")
SIDES = ("ordinary", "none", "per_tensor", "global", "global-kept")
MATRICES = 1000


Loss = Callable[[], Tensor]


def step(optimizer: lt.TernaryAdamW, model: nn.Module, side: str, loss: Loss) -> float:
    """Seconds of one step."""
    clip, _, keeps = side.partition("-")
    keep = sum(param.nbytes for param in model.parameters()) // 2 if keeps else 0
    fused = None if side == "ordinary" else lt.FusedBackward(optimizer, model, clip, keep_bytes=keep)
    start = time.perf_counter()
    if fused is None:
        loss().backward()
    else:
        fused.backward(loss())
    optimizer.step()
    optimizer.zero_grad()
    seconds = time.perf_counter() - start
    if fused is not None:
        fused.remove()
    return seconds


def timed(model: nn.Module, loss: Loss, sides: tuple[str, ...], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side's steps, round by round; in the first two, which are not counted, states are made."""
    optimizers = {side: lt.TernaryAdamW(model.named_parameters(), lr=1e-6) for side in sides}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 2):
        for side, optimizer in optimizers.items():
            took = step(optimizer, model, side, loss)
            if number > 1:
                seconds[side].append(took)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with the texts (see quality_optim.py)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=Path, help="another CSV file, for rehearsals")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = ResultRows("fused_cost", COLUMNS, arguments.rows)
    shared = {"length": arguments.length, "threads": arguments.threads, "rounds": arguments.rounds}
    try:
        model = SmolTask(arguments.data).model(0)
    except MissingData as missing:
        parser.error(str(missing))
    batch = token_batch(1, arguments.length, torch.device("cpu"))
    ordinary = 0.0
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        seconds = timed(model, lambda: exact_loss(model, batch), SIDES, arguments.rounds)
        for side, times in seconds.items():
            ratios = [base / mine for base, mine in zip(seconds["ordinary"], times, strict=True)]
            median = statistics.median(times)
            ordinary = ordinary or median
            print(
                f"checkpointing {checkpointing!s:5} {side:11} {1000 * median:8.0f} ms, "
                f"{statistics.median(ratios):.3f} of the ordinary step's tokens/s"
            )
            rows.append(
                seed=0,
                side=side,
                checkpointing=checkpointing,
                median_ms=1000 * median,
                speed_ratio=statistics.median(ratios),
                ratio_min=min(ratios),
                ratio_max=max(ratios),
                **shared,
            )
    many = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(MATRICES)))
    x = torch.randn(1, 32)
    seconds = timed(many, lambda: many(x).square().sum(), ("ordinary", "none"), 2 * arguments.rounds)
    extra = statistics.median(b - a for a, b in zip(seconds["ordinary"], seconds["none"], strict=True))
    print(f"hooks of {MATRICES} parameters: {1000 * extra:.1f} ms, {100 * extra / ordinary:.2f} % of a SmolLM2 step")
    rows.append(
        seed=0,
        side=f"hooks of {MATRICES} parameters, extra",
        checkpointing=False,
        median_ms=1000 * extra,
        speed_ratio=1 - extra / ordinary,
        **shared,
    )


if __name__ == "__main__":
    main()
