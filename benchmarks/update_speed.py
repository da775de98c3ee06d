"""How long one optimizer step takes on this machine: TernaryAdamW's CPU kernel, its plain torch rule, torch AdamW, and
the low-bit optimizers that run on a CPU.

    python benchmarks/update_speed.py [--layers 30] [--rounds 7] [--threads 2]

Parameters have the shapes of SmolLM2-135M (``--layers`` of its 30). torch AdamW(fused=True) keeps float32 weights,
gradients and states; all others have bfloat16 weights and gradients. All sides run in one process, four steps of each a
round (TernaryAdamW's steps come in fours, of unequal cost), so that noise of the machine meets all alike; sides that
take seconds do one step, and sit out all but three rounds. TernaryAdamW is timed as it runs from its step 128 on, and
once as it runs before its step 64, when it stores its second moment at every step. Each row of
results/update_speed.csv is a median over the rounds with its quartiles, and the ratio to torch's fused AdamW is the
median of the rounds' own ratios. ``bytes_moved``: what a step must read and write at least once, a parameter;
``bandwidth_share``: that over the step's time, as a share of the rate of an addition in place in the same rounds.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from rows import ResultRows
from torch import nn

import leantune as lt
from leantune.kernels import native

COLUMNS = (
    "side", "parameters", "threads", "rounds", "update", "median_ms", "quartile_1_ms", "quartile_3_ms",
    "ratio_to_fused_adamw", "ratio_quartile_1", "ratio_quartile_3", "bytes_moved", "bandwidth_share",
)  # fmt: skip
FUSED = "torch AdamW fused, fp32"
STREAM = "x += 1 on 1 GiB"
SLOW_ROUNDS = 3
STEPS = 4
EARLY = "TernaryAdamW, its first 63 steps"
LATE = 1000
"""The step that the others are taken to."""


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


class Side(NamedTuple):
    step: Callable[[], object]
    bytes_moved: float  # a parameter and step
    slow: bool = False


def sides(layers: int) -> dict[str, Side]:
    """Each side's step. Bytes: states once in and once out, the weight too, the gradient once in, unless noted."""
    count = sum(torch.Size(shape).numel() for shape in shapes(layers))
    numbers = torch.zeros(1 << 28)
    made = {
        STREAM: Side(lambda: numbers.add_(1.0), 2 * 4 * numbers.numel() / count),
        FUSED: Side(torch.optim.AdamW(parameters(layers, torch.float32), fused=True).step, 4 + 2 * 4 + 2 * 8),
    }
    for name, rank in (("TernaryAdamW, no carry", 0), ("TernaryAdamW", 4), (EARLY, 4)):
        optimizer = lt.TernaryAdamW(parameters(layers, torch.bfloat16), carry_rank=rank)
        if name != EARLY:
            age(optimizer)
        # The gradient is read to see whether it is finite, for the step and, where v is stored, for sums over its rows.
        reads = 3.0 if name == EARLY else 2.25
        made[name] = Side(optimizer.step, reads * 2 + 2 * 2 + 2 * optimizer.report().state_bytes / count)
    reference = lt.TernaryAdamW(parameters(layers, torch.bfloat16))
    age(reference)

    def plain() -> None:
        with native.reference_rule():
            reference.step()

    made["TernaryAdamW in plain torch"] = Side(plain, made["TernaryAdamW"].bytes_moved, slow=True)
    return made | peers(layers)


def age(optimizer: lt.TernaryAdamW) -> None:
    """Take an optimizer's count of steps to `LATE`, after a step that allocates."""
    optimizer.step()
    for state in optimizer.state.values():
        state["step"].fill_(LATE)


def peers(layers: int) -> dict[str, Side]:
    """The low-bit optimizers that are installed and run on a CPU."""
    made = {}
    try:
        from torchao.optim import AdamW4bit, AdamW8bit

        made["torchao AdamW8bit"] = Side(
            AdamW8bit(parameters(layers, torch.bfloat16)).step, 2 + 2 * 2 + 2 * 2.0, slow=True
        )
        made["torchao AdamW4bit"] = Side(
            AdamW4bit(parameters(layers, torch.bfloat16)).step, 2 + 2 * 2 + 2 * 1.0, slow=True
        )
    except ImportError as error:
        print(f"torchao is left out: {error}")
    try:
        from bitsandbytes.optim import AdamW8bit as BitsAndBytes

        made["bitsandbytes AdamW8bit"] = Side(
            BitsAndBytes(parameters(layers, torch.bfloat16)).step, 2 + 2 * 2 + 2 * 2.0, slow=True
        )
    except ImportError as error:
        print(f"bitsandbytes is left out: {error}")
    return made


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
    compared = sides(arguments.layers)
    seconds: dict[str, dict[int, float]] = {name: {} for name in compared}
    for number in range(arguments.rounds + 1):
        for name, side in compared.items():
            if side.slow and number > SLOW_ROUNDS:
                continue
            steps = 1 if side.slow else STEPS
            start = time.perf_counter()
            for _ in range(steps):
                side.step()
            if number:  # the first round allocates
                seconds[name][number] = (time.perf_counter() - start) / steps
    count = sum(torch.Size(shape).numel() for shape in shapes(arguments.layers))
    rate = compared[STREAM].bytes_moved / statistics.median(seconds[STREAM].values())
    for name, times in seconds.items():
        low, middle, high = (1000 * value for value in statistics.quantiles(times.values(), n=4))
        ratios = [mine / seconds[FUSED][number] for number, mine in times.items()]
        ratio_low, ratio, ratio_high = statistics.quantiles(ratios, n=4)
        share = compared[name].bytes_moved / (middle / 1000) / rate
        print(f"{name:28} {middle:8.1f} ms ({low:.1f} to {high:.1f}), {ratio:6.2f} x fused AdamW", end="")
        print(f" ({ratio_low:.2f} to {ratio_high:.2f}), {100 * share:.0f} % of the bandwidth of x += 1")
        rows.append(
            seed=0,
            side=name,
            parameters=count,
            threads=arguments.threads,
            rounds=len(times),
            update=native.status() if name.startswith("TernaryAdamW") and not compared[name].slow else "",
            median_ms=round(middle, 1),
            quartile_1_ms=round(low, 1),
            quartile_3_ms=round(high, 1),
            ratio_to_fused_adamw=round(ratio, 3),
            ratio_quartile_1=round(ratio_low, 3),
            ratio_quartile_3=round(ratio_high, 3),
            bytes_moved=round(compared[name].bytes_moved, 2),
            bandwidth_share=round(share, 3),
        )


if __name__ == "__main__":
    main()
