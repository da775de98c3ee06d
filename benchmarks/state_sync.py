"""What it costs to move optimizer states: bytes, and seconds to save, load, gather from shards and broadcast them.

    python benchmarks/state_sync.py [--layers 8] [--rounds 5] [--processes 2]

Parameters have the shapes of SmolLM2-135M (``--layers`` of its 30, without the embedding), bfloat16 for TernaryAdamW,
float32 for the others. Every state is stepped once and then seen as the plain tensors it consists of (codes and scales
of a quantised one), so that all are moved in the same way:

* save, load: ``torch.save`` to a file that is in the page cache, ``torch.load`` of it;
* broadcast: from process 0 to all, in one buffer (a late joiner, or replicas brought into step);
* gather: each process holds its share of that buffer and all get the whole (a checkpoint written from shards, or
  resharding).

Processes talk over gloo on one machine, so ratios to AdamW's fp32 state are the figures, not seconds. All states are
moved in each round, one after another; a row of results/state_sync.csv is the median over the rounds.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import ResultRows
from torch import Tensor
from update_speed import parameters

import leantune as lt

COLUMNS = (
    "state", "parameters", "processes", "rounds", "bytes", "bytes_per_parameter", "file_bytes", "action", "median_ms",
    "ratio_to_adamw",
)  # fmt: skip
ACTIONS = ("save", "load", "broadcast", "gather")
ADAMW = "torch AdamW, fp32"


def optimizers(layers: int) -> dict[str, Callable[[], torch.optim.Optimizer]]:
    """Each side; those whose package is missing are left out, saying so."""

    def of(build: Callable[[Any], Any], dtype: torch.dtype = torch.float32) -> Callable[[], torch.optim.Optimizer]:
        return lambda: build(parameters(layers, dtype)[1:])

    sides = {
        ADAMW: of(lambda p: torch.optim.AdamW(p, lr=1e-3)),
        "TernaryAdamW": of(lambda p: lt.TernaryAdamW(p, lr=1e-3), torch.bfloat16),
        "TacoOneSparse": of(lambda p: lt.TacoOneSparse(p, lr=1e-3), torch.bfloat16),
    }
    try:
        from torchao.optim import AdamW4bit, AdamW8bit

        sides["torchao AdamW8bit"] = of(lambda p: AdamW8bit(p, lr=1e-3))
        sides["torchao AdamW4bit"] = of(lambda p: AdamW4bit(p, lr=1e-3))
    except ImportError as error:
        print(f"torchao is left out: {error}")
    try:
        from bitsandbytes.optim import AdamW8bit as BnbAdamW8bit

        sides["bitsandbytes AdamW8bit"] = of(lambda p: BnbAdamW8bit(p, lr=1e-3))
    except ImportError as error:
        print(f"bitsandbytes is left out: {error}")
    return sides


def plain_tensors(value: Any) -> list[Tensor]:
    """The ordinary tensors that a state consists of, without step counts and other tensors of no dimensions."""
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in plain_tensors(part)]
    if not isinstance(value, Tensor):
        return []
    if hasattr(value, "__tensor_flatten__"):
        return [tensor for name in value.__tensor_flatten__()[0] for tensor in plain_tensors(getattr(value, name))]
    return [value.detach()] if value.dim() else []


def actions(tensors: list[Tensor], file: Path, rank: int, size: int) -> dict[str, Callable[[], None]]:
    """Each action on this state; tensors are moved as bytes of one buffer, so that their number does not count."""
    raw = torch.cat([tensor.contiguous().view(torch.uint8).flatten() for tensor in tensors])
    share = torch.nn.functional.pad(raw, (0, -len(raw) % size)).chunk(size)[rank].contiguous()
    whole = share.new_empty(len(share) * size)

    def save() -> None:
        torch.save(tensors, file)

    def load() -> None:
        torch.load(file, weights_only=True)

    def broadcast() -> None:
        dist.broadcast(raw, 0)

    def gather() -> None:
        dist.all_gather_into_tensor(whole, share)

    return {"save": save, "load": load, "broadcast": broadcast, "gather": gather}


def measure(arguments: argparse.Namespace) -> None:
    """In every process: all states, all actions, ``rounds`` times; process 0 writes the rows."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    count, states = 0, {}
    for name, build in optimizers(arguments.layers).items():
        optimizer = build()
        optimizer.step()
        count = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
        states[name] = plain_tensors(dict(optimizer.state))
    seconds: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{place}.{rank}.pt" for place, name in enumerate(states)}
        todo = {name: actions(tensors, files[name], rank, size) for name, tensors in states.items()}
        for number in range(arguments.rounds + 1):
            for action in ACTIONS:
                for name, does in todo.items():
                    dist.barrier()
                    start = time.perf_counter()
                    does[action]()
                    if number:  # the first round fills caches
                        seconds.setdefault((name, action), []).append(time.perf_counter() - start)
        sizes = {name: file.stat().st_size for name, file in files.items()}
    if rank == 0:
        write(arguments, count, size, states, sizes, seconds)
    dist.destroy_process_group()


def write(
    arguments: argparse.Namespace,
    count: int,
    processes: int,
    states: dict[str, list[Tensor]],
    sizes: dict[str, int],
    seconds: dict[tuple[str, str], list[float]],
) -> None:
    rows = ResultRows("state_sync", COLUMNS, arguments.rows)
    for name, tensors in states.items():
        held = sum(tensor.nbytes for tensor in tensors)
        print(f"{name:24} {held:12,} bytes  {held / count:6.3f} B/param", end="")
        for action in ACTIONS:
            pairs = zip(seconds[name, action], seconds[ADAMW, action], strict=True)
            ratio = statistics.median(mine / theirs for mine, theirs in pairs)
            print(f"  {action} {ratio:.3f}", end="")
            rows.append(
                seed=0,
                state=name,
                parameters=count,
                processes=processes,
                rounds=arguments.rounds,
                bytes=held,
                bytes_per_parameter=round(held / count, 4),
                file_bytes=sizes[name],
                action=action,
                median_ms=round(1000 * statistics.median(seconds[name, action]), 2),
                ratio_to_adamw=round(ratio, 4),
            )
        print("  (times AdamW's)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", default=None, help="CSV file of the rows; for rehearsals")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure(arguments)
        return
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={arguments.processes}"]
    sys.exit(subprocess.run([*launch, __file__, *sys.argv[1:]]).returncode)


if __name__ == "__main__":
    main()
