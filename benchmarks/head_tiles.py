"""A head's gradient in tiles against one that is whole, under a fused backward: time and bytes of a step of the head.

    python benchmarks/head_tiles.py                                  # 1024 x 576 -> 49152 (SmolLM2-135M), bf16
    python benchmarks/head_tiles.py --cases TernaryAdamW/global --repeats 5
    python benchmarks/head_tiles.py --tokens 64 --vocabulary 2000 --tile-bytes 1MiB --rows /tmp/rehearsal.csv

A step is `leantune.linear_cross_entropy` forward, ``fused.backward`` and ``step()``, with nothing below the head: the
ratio is the head's own, the largest there can be. In a model it counts for as much as the head is of the model's work.

Seconds are the process's own on its processors: others on the machine do not count, and several threads add up. Both
sides run in one process, one after the other in every round. ``--first-step`` is the number of the first timed step:
where TernaryAdamW stores its second moment decides how often it looks at a gradient. "temporary" bytes are those of
storages that come and go in a step, "largest" is the largest of them, both counted in a step that is not timed.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from rows import ResultRows
from torch import Tensor, nn

import leantune as lt
from leantune.activations.loss import TILE_BYTES
from leantune.memory.measured.process import return_large_frees
from leantune.memory.measured.tracker import track
from leantune.memory.sizes import format_bytes, parse_size

COLUMNS = [
    "rule",
    "clip",
    "head",
    "tokens",
    "hidden",
    "vocabulary",
    "dtype",
    "threads",
    "tile_bytes",
    "first_step",
    "repeats",
    "seconds",
    "seconds_min",
    "seconds_max",
    "seconds_to_whole",
    "seconds_to_whole_min",
    "seconds_to_whole_max",
    "temporary_bytes",
    "largest_bytes",
]
RULES = {
    "TernaryAdamW": lambda params: lt.TernaryAdamW(params, lr=1e-5),
    "AdamW": lambda params: lt.AdamW(params, lr=1e-5),
    "Lomo": lambda params: lt.Lomo(params, lr=1e-3),
    "AdaLomo": lambda params: lt.AdaLomo(params, lr=1e-4),
}
CASES = ("TernaryAdamW/per_tensor", "TernaryAdamW/global", "Lomo/per_tensor")


@dataclass
class Side:
    """A head, its optimizer, and what was measured."""

    weight: nn.Parameter
    optimizer: Any
    fused: lt.FusedBackward
    seconds: list[float] = field(default_factory=list)
    temporary: int = 0
    largest: int = 0

    def step(self, hidden: Tensor, labels: Tensor, tile_bytes: int) -> None:
        loss = lt.linear_cross_entropy(hidden, self.weight, labels, tile_bytes=tile_bytes)
        self.fused.backward(loss)
        self.optimizer.step()
        hidden.grad = None


def side_of(args: argparse.Namespace, rule: str, clip: str, head: str) -> Side:
    g = torch.Generator().manual_seed(args.seed)
    values = torch.randn(args.vocabulary, args.hidden, generator=g) * args.hidden**-0.5
    weight = nn.Parameter(values.to(getattr(torch, args.dtype)))
    optimizer = RULES[rule]([weight])
    return Side(weight, optimizer, lt.FusedBackward(optimizer, clip=clip, head=head))


def compare(args: argparse.Namespace, rule: str, clip: str, rows: ResultRows) -> None:
    g = torch.Generator().manual_seed(args.seed + 1)
    hidden = torch.randn(args.tokens, args.hidden, generator=g).to(getattr(torch, args.dtype)).requires_grad_()
    labels = torch.randint(args.vocabulary, (args.tokens,), generator=g)
    sides = {head: side_of(args, rule, clip, head) for head in ("whole", "tiles")}
    for side in sides.values():
        side.step(hidden, labels, args.tile_bytes)
        side.optimizer.state[side.weight]["step"].fill_(args.first_step - 2)
        with track() as tracker:
            side.step(hidden, labels, args.tile_bytes)
        side.temporary, side.largest = tracker.peak_temporary_bytes, tracker.largest_allocation_bytes
    for number in range(args.repeats):
        for head, side in sides.items():
            began = time.process_time()
            side.step(hidden, labels, args.tile_bytes)
            side.seconds.append(time.process_time() - began)
            print(f"round {number}: {rule} {clip} {head} {side.seconds[-1]:.2f} s", flush=True)
    for head, side in sides.items():
        ratios = [one / other for one, other in zip(side.seconds, sides["whole"].seconds)]
        rows.append(
            seed=args.seed,
            rule=rule,
            clip=clip,
            head=head,
            tokens=args.tokens,
            hidden=args.hidden,
            vocabulary=args.vocabulary,
            dtype=args.dtype,
            threads=torch.get_num_threads(),
            tile_bytes=args.tile_bytes,
            first_step=args.first_step,
            repeats=args.repeats,
            seconds=statistics.median(side.seconds),
            seconds_min=min(side.seconds),
            seconds_max=max(side.seconds),
            seconds_to_whole=statistics.median(ratios),
            seconds_to_whole_min=min(ratios),
            seconds_to_whole_max=max(ratios),
            temporary_bytes=side.temporary,
            largest_bytes=side.largest,
        )
        print(
            f"{rule} {clip} {head:5}  {statistics.median(side.seconds):7.2f} s  "
            f"{statistics.median(ratios):5.2f} ({min(ratios):.2f} to {max(ratios):.2f}) times whole  "
            f"temporary {format_bytes(side.temporary)}  largest {format_bytes(side.largest)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, help="RULE/CLIP")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tile-bytes", type=parse_size, default=TILE_BYTES)
    parser.add_argument("--first-step", type=int, default=3, help="number of the first timed step, at least 3")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", help="another file for the rows")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    return_large_frees()
    rows = ResultRows("head_tiles", COLUMNS, args.rows)
    for case in args.cases:
        rule, _, clip = case.partition("/")
        if rule not in RULES:
            parser.error(f"--cases takes RULE/CLIP with a rule of {', '.join(RULES)}, not {case}")
        compare(args, rule, clip, rows)


if __name__ == "__main__":
    main()
