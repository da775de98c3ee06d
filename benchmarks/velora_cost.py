"""What VeLoRA costs a linear layer in time: forward and backward of one layer, against the plain layer and PEFT.

    python benchmarks/velora_cost.py                                     # 4096 tokens, 576 to 4096 features, float32
    python benchmarks/velora_cost.py --dtype bfloat16 --features 576 1536
    python benchmarks/velora_cost.py --tokens 64 --features 96 --rows /tmp/rehearsal.csv

Sides: ``plain``, nn.Linear; ``velora``, the same layer under apply_velora; ``factored``, with factored=True; ``peft``,
the autograd function of PEFT's VeLoRA variant (peft.tuners.lora.velora) on the same weight, with the same vector and
groups. The input wants a gradient, as inside a model; weight gradients are dropped after each step. With bfloat16 on a
CPU that lacks 16-bit products, plain and ours multiply in fp32 (`leantune.kernels.half_linear`), as `leantune train`
does; PEFT's multiplies as torch does.

Seconds are the process's own on its processors: others on the machine do not count, and several threads add up. All
sides run in one process, one after the other in every round; a ratio is the median over the rounds' own.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from peft.tuners.lora.velora import VeloraFunction
from rows import ResultRows
from torch import Tensor, nn

import leantune as lt
from leantune.kernels.half_linear import use_fp32_products
from leantune.memory.measured.process import return_large_frees

COLUMNS = (
    "side",
    "tokens",
    "features",
    "outputs",
    "groups",
    "dtype",
    "threads",
    "rounds",
    "seconds",
    "seconds_min",
    "seconds_max",
    "ratio_to_plain",
    "ratio_to_plain_min",
    "ratio_to_plain_max",
)
Step = Callable[[Tensor, Tensor], None]


def sides_of(
    features: int, groups: int, dtype: torch.dtype, names: list[str], x: Tensor
) -> tuple[dict[str, Step], torch.optim.Optimizer | None]:
    """A forward and backward of each side, directions set; and the optimizer without which none trains factored."""
    optimizer = None
    layers = {}
    for name in names:
        torch.manual_seed(0)
        layers[name] = nn.Sequential(nn.Linear(features, features, bias=False).to(dtype))
    ours = lt.apply_velora(layers["velora"], ["0"], num_groups=groups)
    ours.use_fp32_products()
    if "factored" in layers:
        handle = lt.apply_velora(layers["factored"], ["0"], num_groups=groups, factored=True)
        optimizer = torch.optim.SGD(layers["factored"].parameters(), lr=0.0)
        handle.attach(optimizer)
        handle.use_fp32_products()
    use_fp32_products(layers["plain"])
    layers["velora"](x[:64])
    v = ours.sites[0].v.to(dtype)
    steps = {name: module_step(layer) for name, layer in layers.items()}
    if "peft" in layers:
        weight = layers["peft"][0].weight
        steps["peft"] = weight_step(lambda x: VeloraFunction.apply(x, weight, None, v, groups, 1.0), [weight])
    return steps, optimizer


def module_step(layer: nn.Module) -> Step:
    return weight_step(layer, list(layer.parameters()))


def weight_step(forward: Callable[[Tensor], Tensor], parameters: list[nn.Parameter]) -> Step:
    def step(x: Tensor, grad: Tensor) -> None:
        forward(x).backward(grad)
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    return step


def compare(args: argparse.Namespace, features: int, rows: ResultRows) -> None:
    dtype = getattr(torch, args.dtype)
    generator = torch.Generator().manual_seed(args.seed)
    x = (torch.randn(args.tokens, features, generator=generator) + 0.2).to(dtype).requires_grad_()
    grad = torch.randn(args.tokens, features, generator=generator).to(dtype)
    steps, _optimizer = sides_of(features, args.groups, dtype, args.sides, x)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step(x, grad)
    for _ in range(args.rounds):
        for name, step in steps.items():
            began = time.process_time()
            step(x, grad)
            seconds[name].append(time.process_time() - began)
    for name, times in seconds.items():
        ratios = [one / plain for one, plain in zip(times, seconds["plain"], strict=True)]
        rows.append(
            seed=args.seed,
            side=name,
            tokens=args.tokens,
            features=features,
            outputs=features,
            groups=args.groups,
            dtype=args.dtype,
            threads=torch.get_num_threads(),
            rounds=args.rounds,
            seconds=statistics.median(times),
            seconds_min=min(times),
            seconds_max=max(times),
            ratio_to_plain=statistics.median(ratios),
            ratio_to_plain_min=min(ratios),
            ratio_to_plain_max=max(ratios),
        )
        print(
            f"{features:5} {args.dtype:8} {name:8} {statistics.median(times):8.4f} s  "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) times plain",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--features", type=int, nargs="+", default=[576, 1536, 4096])
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--sides", nargs="+", default=["plain", "velora", "factored", "peft"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", help="another file for the rows")
    args = parser.parse_args()
    if not {"plain", "velora"} <= set(args.sides):
        parser.error("--sides needs plain and velora")
    torch.set_num_threads(args.threads)
    return_large_frees()
    rows = ResultRows("velora_cost", COLUMNS, args.rows)
    for features in args.features:
        compare(args, features, rows)


if __name__ == "__main__":
    main()
