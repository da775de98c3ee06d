r"""The headline without a GPU: full fine-tuning steps of a 7B-shaped Llama on a machine of 24 GiB.

    python benchmarks/full_7b_step.py                   # the 7B shape; needs the machine for itself
    python benchmarks/full_7b_step.py --layers 2 --hidden 512 --intermediate 1376 --heads 8 --vocabulary 4000 \
        --rows /tmp/rehearsal.csv                       # a rehearsal

Random weights in bf16, every parameter trained: TernaryAdamW, FusedBackward with per-tensor clipping, non-reentrant
gradient checkpointing, and the loss without logits. It prints what was planned by part, what the operating system
measured (resident bytes, VmHWM), and the seconds of each phase, and adds a row to benchmarks/results/full_7b_step.csv.

What keeps the resident size equal to what tensors use:
* the model is built on the meta device and each tensor is allocated once, in bf16: fp32 weights never exist;
* glibc's mmap threshold is fixed at 1 MiB (`return_large_frees`): by default it grows to the size of each freed block,
  up to 32 MiB, and gradients and activations freed later would stay resident inside the heap;
* states are allocated at each parameter's first update: the first step shows the growth, the second the steady peak.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rows import ResultRows
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import leantune as lt
from leantune.kernels.half_linear import use_fp32_products
from leantune.memory.measured.process import (
    machine_memory,
    process_peak,
    reset_process_peak,
    return_freed_memory,
    return_large_frees,
)
from leantune.memory.parts import LABELS, PARTS
from leantune.memory.sizes import format_bytes, parse_size
from leantune.memory.traced.plan import Plan, plan_run
from leantune.memory.traced.trace import exact_loss

COLUMNS = [
    "layers",
    "hidden",
    "intermediate",
    "heads",
    "vocabulary",
    "parameters",
    "batch",
    "length",
    "steps",
    "threads",
    "carry_rank",
    "planned_bytes",
    *(f"planned_{part}" for part in PARTS),
    "state_bytes",
    "baseline_bytes",
    "built_bytes",
    "after_first_step_bytes",
    "peak_build_bytes",
    "peak_first_step_bytes",
    "peak_steady_bytes",
    "peak_process_bytes",
    "build_seconds",
    "forward_seconds",
    "backward_seconds",
    "update_seconds",
    "step_seconds",
    "first_loss",
    "last_loss",
    "grad_norm",
]


@dataclass
class Seconds:
    """Wall-clock seconds of a step's phases. ``backward`` leaves the updates made inside it out."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.update


@dataclass
class Measurement:
    """What the operating system saw, in bytes, and what each step did."""

    baseline: int = 0
    built: int = 0
    peak_build: int = 0
    before_training: int = 0
    after_first_step: int = 0
    peak_steps: list[int] = field(default_factory=list)
    build_seconds: float = 0.0
    seconds: list[Seconds] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    @property
    def peak_process(self) -> int:
        return max(self.peak_build, *self.peak_steps)

    @property
    def peak_steady(self) -> int:
        """The peak of the steps after the first (of the first, where there is no other)."""
        return max(self.peak_steps[1:] or self.peak_steps)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--batch", type=int, default=1, help="sequences in a step")
    parser.add_argument("--length", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--carry-rank", type=int, default=None, help="default: the optimizer's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", default="20GiB", help="resident peak above which the benchmark fails (exit 1)")
    parser.add_argument("--rows", default=None, help="CSV file of the row; for rehearsals")
    parser.add_argument("--again", action="store_true", help="measure even if the row exists")
    parser.add_argument("--plan-only", action="store_true", help="print the plan and stop before training")
    return parser.parse_args(argv)


def build(options: argparse.Namespace) -> nn.Module:
    """The Llama in bf16, each tensor allocated once and filled in place; gradient checkpointing on.

    Where the CPU cannot multiply in bf16, its linear layers multiply in fp32 a tile at a time.
    """
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        vocab_size=options.vocabulary,
        max_position_embeddings=max(2048, options.length),
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    # Its frequencies are a formula, not weights: the meta device kept no values of them.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    generator = torch.Generator().manual_seed(options.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, config.initializer_range, generator=generator)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    use_fp32_products(model)
    return model.train()


@contextmanager
def timed_updates(optimizer: Any, seconds: Seconds) -> Iterator[None]:
    """Add the time of every update of a parameter to ``seconds.update``."""
    original: Callable[..., Any] = optimizer.update

    def update(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            seconds.update += time.perf_counter() - began

    optimizer.update = update
    try:
        yield
    finally:
        del optimizer.update


def one_step(model: nn.Module, batch: dict[str, Tensor], optimizer: Any, fused: Any, into: Measurement) -> None:
    """Forward, backward with the updates inside it, and the closing ``step()``; peak and seconds go to ``into``."""
    seconds = Seconds()
    reset_process_peak()
    with timed_updates(optimizer, seconds):
        began = time.perf_counter()
        loss = exact_loss(model, batch)
        seconds.forward = time.perf_counter() - began
        loss.backward()
        optimizer.step()
        seconds.backward = time.perf_counter() - began - seconds.forward - seconds.update
    into.peak_steps.append(process_peak().peak)
    into.seconds.append(seconds)
    into.losses.append(float(loss.detach()))
    into.norms.append(fused.grad_norm)


def measure(options: argparse.Namespace) -> tuple[Plan, Measurement, int, int]:
    """(plan, measurement, parameters, bytes of state tensors)."""
    into = Measurement(baseline=process_peak().current)
    began = time.perf_counter()
    model = build(options)
    into.build_seconds = time.perf_counter() - began
    return_freed_memory()
    into.peak_build, into.built = process_peak().peak, process_peak().current
    rank = {} if options.carry_rank is None else {"carry_rank": options.carry_rank}
    optimizer = lt.TernaryAdamW(model.named_parameters(), lr=options.lr, seed=options.seed, **rank)
    plan = plan_run(
        model, optimizer, batch_size=options.batch, length=options.length, fused=True, clip="per_tensor", loss="exact"
    )
    print(plan.table(), flush=True)
    return_freed_memory()
    into.peak_build, into.before_training = max(into.peak_build, process_peak().peak), process_peak().current
    if not options.plan_only:
        fused = lt.FusedBackward(optimizer, clip="per_tensor")
        generator = torch.Generator().manual_seed(options.seed + 1)
        for step in range(options.steps):
            shape = (options.batch, options.length)
            tokens = torch.randint(options.vocabulary, shape, generator=generator)
            one_step(model, {"input_ids": tokens, "labels": tokens}, optimizer, fused, into)
            if step == 0:
                return_freed_memory()
                into.after_first_step = process_peak().current
            done = into.seconds[-1]
            print(
                f"step {step + 1}: loss {into.losses[-1]:.4f}, gradient norm {into.norms[-1]:.3f}, "
                f"peak {format_bytes(into.peak_steps[-1])}, forward {done.forward:.1f} s, "
                f"backward {done.backward:.1f} s, updates {done.update:.1f} s",
                flush=True,
            )
        fused.remove()
    states = sum(
        tensor.numel() * tensor.element_size()
        for state in optimizer.state.values()
        for tensor in state.values()
        if isinstance(tensor, Tensor)
    )
    return plan, into, sum(p.numel() for p in model.parameters()), states


def report(options: argparse.Namespace, plan: Plan, found: Measurement, parameters: int, states: int) -> None:
    """Plan beside measurement. Resident growth is what a stage left behind; tensors are what the plan counts."""
    steady = plan.total - plan.parts["weights"] - plan.parts["optimizer_states"]
    rows = [
        ("weights", plan.parts["weights"], found.built - found.baseline, "resident growth while building"),
        ("optimizer states", plan.parts["optimizer_states"], states, "sum of state tensors"),
        (
            "  the same, resident",
            plan.parts["optimizer_states"],
            found.after_first_step - found.before_training,
            "resident growth over the first step",
        ),
        (
            "everything else at the peak",
            steady,
            found.peak_steady - found.after_first_step,
            "peak of a later step above what the first left",
        ),
        (
            "interpreter and libraries",
            found.baseline,
            found.baseline + found.before_training - found.built,
            "resident before the model, and growth while planning",
        ),
        ("total", plan.total + found.baseline, found.peak_process, "peak of the whole process (VmHWM)"),
    ]
    shape = f"{parameters / 1e9:.3f} B parameters, {options.batch} x {options.length} tokens"
    print(f"\n{shape}: planned and measured")
    print(f"  {'':28} {'planned':>11} {'measured':>11}   how it was measured")
    for name, planned, measured, how in rows:
        print(f"  {name:28} {format_bytes(planned):>11} {format_bytes(measured):>11}   {how}")
    inside = [part for part in PARTS if plan.at_peak[part] and part not in ("weights", "optimizer_states")]
    print("  everything else, as planned: " + ", ".join(f"{LABELS[p]} {format_bytes(plan.at_peak[p])}" for p in inside))
    # fp32 weights, gradients and two moments.
    print(
        f"  torch AdamW in fp32 needs {format_bytes(16 * parameters)} for weights, gradients and states (by arithmetic)"
    )
    print("\n  step   forward  backward   updates     total        peak")
    for index, (seconds, peak) in enumerate(zip(found.seconds, found.peak_steps)):
        print(
            f"  {index + 1:4} {seconds.forward:8.1f}s {seconds.backward:8.1f}s {seconds.update:8.1f}s "
            f"{seconds.total:8.1f}s {format_bytes(peak):>11}"
        )


def write_row(
    rows: ResultRows, options: argparse.Namespace, plan: Plan, found: Measurement, parameters: int, states: int
) -> None:
    last = found.seconds[-1]
    rows.append(
        **key(options),
        seed=options.seed,
        parameters=parameters,
        threads=options.threads,
        planned_bytes=plan.total,
        **{f"planned_{part}": size for part, size in plan.parts.items()},
        state_bytes=states,
        baseline_bytes=found.baseline,
        built_bytes=found.built,
        after_first_step_bytes=found.after_first_step,
        peak_build_bytes=found.peak_build,
        peak_first_step_bytes=found.peak_steps[0],
        peak_steady_bytes=found.peak_steady,
        peak_process_bytes=found.peak_process,
        build_seconds=found.build_seconds,
        forward_seconds=last.forward,
        backward_seconds=last.backward,
        update_seconds=last.update,
        step_seconds=last.total,
        first_loss=found.losses[0],
        last_loss=found.losses[-1],
        grad_norm=found.norms[-1],
    )


def key(options: argparse.Namespace) -> dict[str, Any]:
    """What makes a measurement another one."""
    names = ("layers", "hidden", "intermediate", "heads", "vocabulary", "batch", "length", "steps")
    rank = "default" if options.carry_rank is None else options.carry_rank
    return {name: getattr(options, name) for name in names} | {"carry_rank": rank}


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    limit = parse_size(options.limit, name="--limit")
    rows = ResultRows("full_7b_step", COLUMNS, options.rows)
    if rows.has(**key(options), seed=options.seed) and not options.again and not options.plan_only:
        print(f"{rows.path} has this row already; --again measures it once more")
        return 0
    if not return_large_frees():
        print("note: this C library keeps freed blocks; the resident peak may exceed what tensors use")
    torch.set_num_threads(options.threads)
    print(f"machine: {format_bytes(machine_memory())}, {options.threads} threads; limit {format_bytes(limit)}")
    if not reset_process_peak():
        print("note: the resident peak cannot be reset here: every step's peak is that of the process so far")
    plan, found, parameters, states = measure(options)
    if options.plan_only:
        return 0
    report(options, plan, found, parameters, states)
    if not all(math.isfinite(loss) for loss in found.losses):
        print("FAILED: a loss is not finite; no row written")
        return 1
    write_row(rows, options, plan, found, parameters, states)
    print(f"\nrow added to {rows.path}")
    if found.peak_process >= limit:
        print(f"FAILED: the process reached {format_bytes(found.peak_process)}, the limit is {format_bytes(limit)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
