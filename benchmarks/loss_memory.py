"""The loss without logits against the loss with them: time, and bytes, of one forward and backward of the head.

    python benchmarks/loss_memory.py                                  # 512 x 576 -> 49152 (SmolLM2-135M), bf16
    python benchmarks/loss_memory.py --dtype float32 --repeats 5
    python benchmarks/loss_memory.py --tokens 64 --vocabulary 2000 --rows /tmp/rehearsal.csv

Three ways to the same loss and the same gradients, of the hidden states and of the head:
* full: ``F.cross_entropy(F.linear(hidden, weight).float(), labels)``, what a model does by itself;
* full_fp32: the same, its 16-bit products made in fp32 as leantune does on a CPU that has no 16-bit matrix products
  (without which "full" is slow for a reason that has nothing to do with logits; left out for fp32, where it is "full");
* exact: `leantune.linear_cross_entropy`.

All run in one process, one after the other in every round; a row holds the median, the extremes, and the median of the
rounds' ratios. "temporary" bytes are those of storages that came and went, counted on fake tensors of the same shapes;
"resident" is how far the process's peak rose above what it held before, gradients included.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from rows import ResultRows
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import leantune as lt
from leantune.activations.loss import TILE_BYTES
from leantune.kernels.half_linear import half_linear
from leantune.memory.measured.process import process_peak, reset_process_peak, return_freed_memory, return_large_frees
from leantune.memory.measured.tracker import track
from leantune.memory.sizes import format_bytes, parse_size

COLUMNS = [
    "side",
    "tokens",
    "hidden",
    "vocabulary",
    "ignored",
    "dtype",
    "threads",
    "tile_bytes",
    "repeats",
    "loss",
    "gradient_difference",
    "seconds",
    "seconds_min",
    "seconds_max",
    "seconds_to_exact",
    "seconds_to_exact_min",
    "seconds_to_exact_max",
    "temporary_bytes",
    "resident_bytes",
]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Side:
    """One way to compute the loss, and what was measured of it."""

    loss: Loss
    seconds: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    value: float = 0.0
    gradients: list[Tensor] = field(default_factory=list)
    temporary: int = 0


def sides_of(names: list[str], tile_bytes: int) -> dict[str, Side]:
    losses: dict[str, Loss] = {
        "full": lambda h, w, y: F.cross_entropy(F.linear(h, w).float(), y),
        "full_fp32": lambda h, w, y: F.cross_entropy(half_linear(h, w, None).float(), y),
        "exact": lambda h, w, y: lt.linear_cross_entropy(h, w, y, tile_bytes=tile_bytes),
    }
    return {name: Side(losses[name]) for name in names}


def inputs(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor]:
    """hidden (tokens, H), weight (V, H), labels (tokens,) of the seed; logits of about unit size."""
    g = torch.Generator().manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.tokens, args.hidden, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(args.vocabulary, args.hidden, generator=g) * args.hidden**-0.5).to(dtype).requires_grad_()
    labels = torch.randint(args.vocabulary, (args.tokens,), generator=g)
    labels[torch.randperm(args.tokens, generator=g)[: args.ignored]] = -100
    return hidden, weight, labels


def count_temporaries(side: Side, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    plain = [tensor.detach() for tensor in tensors]
    with FakeTensorMode() as mode:
        hidden, weight, labels = (mode.from_tensor(tensor) for tensor in plain)
        hidden.requires_grad_()
        weight.requires_grad_()
        with track() as tracker:
            loss = side.loss(hidden, weight, labels)
            loss.backward()
            del loss
    side.temporary = tracker.peak_temporary_bytes


def run_once(side: Side, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden, weight, labels = tensors
    side.gradients.clear()
    gc.collect()
    return_freed_memory()
    reset_process_peak()
    before = process_peak().current
    began = time.perf_counter()
    loss = side.loss(hidden, weight, labels)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    side.seconds.append(time.perf_counter() - began)
    side.resident.append(process_peak().peak - before)
    side.value = loss.item()
    side.gradients = [gradient.detach() for gradient in gradients]


def difference(side: Side, reference: Side) -> float:
    """Largest |difference| of a gradient, by the largest magnitude of that gradient."""
    pairs = zip(side.gradients, reference.gradients)
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)


def compare(args: argparse.Namespace) -> None:
    names = [name for name in args.sides if not (name == "full_fp32" and args.dtype == "float32")]
    sides, tensors = sides_of(names, args.tile_bytes), inputs(args)
    exact = sides["exact"]
    for side in sides.values():
        count_temporaries(side, tensors)
    differences: dict[str, float] = {}
    for number in range(args.repeats + args.warm_up):
        for name, side in sides.items():
            run_once(side, tensors)
            print(f"round {number}: {name} {side.seconds[-1]:.2f} s", flush=True)
        if number == 0:
            differences = {name: difference(side, exact) for name, side in sides.items()}
        for side in sides.values():
            side.gradients.clear()
    rows = ResultRows("loss_memory", COLUMNS, args.rows)
    for name, side in sides.items():
        write_row(rows, args, name, side, exact, differences[name])


def write_row(
    rows: ResultRows, args: argparse.Namespace, name: str, side: Side, exact: Side, gradient_difference: float
) -> None:
    seconds = side.seconds[args.warm_up :]
    ratios = [one / other for one, other in zip(seconds, exact.seconds[args.warm_up :])]
    resident = int(statistics.median(side.resident[args.warm_up :]))
    rows.append(
        seed=args.seed,
        side=name,
        tokens=args.tokens,
        hidden=args.hidden,
        vocabulary=args.vocabulary,
        ignored=args.ignored,
        dtype=args.dtype,
        threads=torch.get_num_threads(),
        tile_bytes=args.tile_bytes,
        repeats=args.repeats,
        loss=side.value,
        gradient_difference=gradient_difference,
        seconds=statistics.median(seconds),
        seconds_min=min(seconds),
        seconds_max=max(seconds),
        seconds_to_exact=statistics.median(ratios),
        seconds_to_exact_min=min(ratios),
        seconds_to_exact_max=max(ratios),
        temporary_bytes=side.temporary,
        resident_bytes=resident,
    )
    print(
        f"{name:10} loss {side.value:.5f}  {statistics.median(seconds):7.2f} s  "
        f"{statistics.median(ratios):6.2f} ({min(ratios):.2f} to {max(ratios):.2f}) times exact  "
        f"temporary {format_bytes(side.temporary)}  resident {format_bytes(resident)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--ignored", type=int, default=0, help="tokens without a label")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--tile-bytes", type=parse_size, default=TILE_BYTES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1, help="rounds that are run and not counted")
    parser.add_argument("--sides", nargs="+", default=["full", "full_fp32", "exact"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", help="another file for the rows")
    args = parser.parse_args()
    unknown = sorted(set(args.sides) - {"full", "full_fp32", "exact"})
    if unknown or "exact" not in args.sides or args.repeats < 1 or args.warm_up < 0:
        parser.error(
            '--sides takes full, full_fp32 and exact ("exact" is what the others are compared with); rounds > 0'
        )
    torch.set_num_threads(args.threads)
    return_large_frees()
    compare(args)


if __name__ == "__main__":
    main()
