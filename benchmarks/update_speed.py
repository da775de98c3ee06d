"""How long one optimizer step takes on this machine: TernaryAdamW's CPU kernel, its plain torch rule, torch AdamW.

    python benchmarks/update_speed.py [--layers 30] [--rounds 7] [--threads 2]

Parameters have the shapes of SmolLM2-135M (``--layers`` of its 30). torch AdamW(fused=True) keeps float32 weights,
gradients and states; TernaryAdamW has bfloat16 weights and gradients. All sides run in one process, one step of each a
round, so that noise of the machine meets all alike; each row of results/update_speed.csv is a median over the rounds
with its quartiles, and the ratio to torch's fused AdamW is the median of the rounds' own ratios.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from rows import ResultRows
from torch import nn

import leantune as lt
from leantune.kernels import native

COLUMNS = (
    "side", "parameters", "threads", "rounds", "update", "median_ms", "quartile_1_ms", "quartile_3_ms",
    "ratio_to_fused_adamw", "ratio_quartile_1", "ratio_quartile_3",
)  # fmt: skip
FUSED = "torch AdamW fused, fp32"


def shapes(layers: int) -> list[tuple[int, ...]]:
    """SmolLM2-135M: width 576, 9 heads of 64 with 3 key-value heads, inner width 1536, vocabulary 49,152, tied head."""
    block = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536), (576,), (576,)]
    return [(49152, 576), *(shape for _ in range(layers) for shape in block), (576,)]


def parameters(layers: int, dtype: torch.dtype) -> list[nn.Parameter]:
    """Weights of std 0.02, each with a gradient."""
    made = []
    for shape in shapes(layers):
        param = nn.Parameter((torch.randn(shape) * 0.02).to(dtype))
        param.grad = torch.randn(shape).to(dtype)
        made.append(param)
    return made


def sides(layers: int) -> dict[str, Callable[[], object]]:
    """Each side's step."""
    ternary = {rank: lt.TernaryAdamW(parameters(layers, torch.bfloat16), carry_rank=rank) for rank in (0, 4)}
    reference = lt.TernaryAdamW(parameters(layers, torch.bfloat16))

    def plain() -> None:
        with native.reference_rule():
            reference.step()

    return {
        FUSED: torch.optim.AdamW(parameters(layers, torch.float32), fused=True).step,
        "TernaryAdamW, no carry": ternary[0].step,
        "TernaryAdamW": ternary[4].step,
        "TernaryAdamW in plain torch": plain,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rows", default=None, help="CSV file of the rows; for rehearsals")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rows = ResultRows("update_speed", COLUMNS, arguments.rows)
    steps = sides(arguments.layers)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(arguments.rounds + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if number:  # the first round allocates
                seconds[name].append(time.perf_counter() - start)
    count = sum(torch.Size(shape).numel() for shape in shapes(arguments.layers))
    for name, times in seconds.items():
        low, middle, high = (1000 * value for value in statistics.quantiles(times, n=4))
        ratios = [mine / fused for mine, fused in zip(times, seconds[FUSED], strict=True)]
        ratio_low, ratio, ratio_high = statistics.quantiles(ratios, n=4)
        print(f"{name:28} {middle:8.1f} ms ({low:.1f} to {high:.1f})", end="")
        print(f", {ratio:6.2f} x fused AdamW ({ratio_low:.2f} to {ratio_high:.2f})")
        rows.append(
            seed=0,
            side=name,
            parameters=count,
            threads=arguments.threads,
            rounds=arguments.rounds,
            update="torch" if name == FUSED else "plain torch" if "plain" in name else native.status(),
            median_ms=round(middle, 1),
            quartile_1_ms=round(low, 1),
            quartile_3_ms=round(high, 1),
            ratio_to_fused_adamw=round(ratio, 3),
            ratio_quartile_1=round(ratio_low, 3),
            ratio_quartile_3=round(ratio_high, 3),
        )


if __name__ == "__main__":
    main()
