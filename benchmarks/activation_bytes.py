"""What forward keeps for backward of SmolLM2-135M at 1,024 tokens: plain, each exact saving, VeLoRA, checkpointing.

    python benchmarks/activation_bytes.py                               # bytes, traced without data: a minute or two
    python benchmarks/activation_bytes.py --rounds 5                    # real steps as well: bytes, loss, time
    python benchmarks/activation_bytes.py --methods lora --sides plain exact --rounds 3 --rows /tmp/rehearsal.csv
    python benchmarks/activation_bytes.py --table                       # docs/velora.md's table, from the rows

Full fine-tuning and LoRA (r = 16, all linear layers, dropout 0.05 or none), bf16 weights, the loss without logits
(`leantune.linear_cross_entropy`), gradients applied and freed inside backward by Lomo, so that no state and no gradient
hides what activations cost. A row of kind "trace" holds the bytes of a step walked on fake tensors; one of kind "step"
those of a real one, its loss (equal to the plain one's where a side is exact), and its time against the plain step's:
all sides run in one process, one after the other in every round; the median of the rounds' ratios and their extremes.
Seconds are the process's own on its processors: others on the machine do not count.

"activation_bytes" are alive when backward begins; "autograd_bytes" are those that autograd saves, weights aside, which
do not show what checkpointing holds; "peak_bytes" is the most in use at once, weights included. Rows that exist are not
measured again; a timed side is measured together with "plain".
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from quality.summary import markdown
from rows import ResultRows
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import leantune as lt
from leantune.activations.saved_bytes import SavedBytes
from leantune.kernels.half_linear import use_fp32_products
from leantune.memory import MemoryTracker, plan_run
from leantune.memory.sizes import MIB, format_bytes
from leantune.training.demo_model import demo_model_path

COLUMNS = [
    "method",
    "side",
    "kind",
    "tokens",
    "dtype",
    "threads",
    "rounds",
    "loss",
    "activation_bytes",
    "autograd_bytes",
    "peak_bytes",
    "activations_to_plain",
    "seconds",
    "seconds_to_plain",
    "seconds_to_plain_min",
    "seconds_to_plain_max",
]
SAVINGS = ("swiglu", "dropout", "shared_adapter_input")
METHODS = {
    "full": ["plain", "swiglu", "velora", "velora+exact", "siblings+exact", *(f"checkpoint{n}" for n in (1, 2, 4))],
    "lora": [
        "plain", *SAVINGS, "exact", "velora", "velora+exact", "siblings+exact",
        *(f"checkpoint{n}" for n in (1, 2, 4)),
    ],
    "lora-no-dropout": ["plain", "swiglu", "shared_adapter_input", "exact", "siblings+exact", "checkpoint1"],
}  # fmt: skip
for method_of_sides in ("full", "lora"):
    METHODS[method_of_sides].extend(f"exact+checkpoint{n}" for n in (1, 2, 4))
VELORA = {
    "velora": ("down_proj", "v_proj"),
    "siblings": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
}
"""Layers under VeLoRA: its paper's, and those whose inputs exact savings leave in memory."""


@dataclass
class Measured:
    """What a side was measured to need."""

    activation_bytes: int = 0
    autograd_bytes: int = 0
    peak_bytes: int = 0
    loss: float | None = None
    seconds: list[float] = field(default_factory=list)


def build(method: str) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.bfloat16)
    model.config.use_cache = False
    if method != "full":
        torch.manual_seed(0)
        dropout = 0.05 if method == "lora" else 0.0
        lora = LoraConfig(r=16, lora_alpha=16, lora_dropout=dropout, target_modules="all-linear")
        model = get_peft_model(model, lora)
        model.enable_input_require_grads()  # as every trainer does for checkpointing, here on every side alike
    return model.train()


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss without logits, through the adapters where there are any."""
    causal: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    hidden = causal.model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
    labels = batch["labels"].clone()
    labels[:, :-1], labels[:, -1] = batch["labels"][:, 1:], -100
    return lt.linear_cross_entropy(hidden, causal.lm_head.weight, labels)


@contextmanager
def applied(model: nn.Module, side: str) -> Iterator[None]:
    """The model under a side's savings, and as it was afterwards."""
    causal: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    with ExitStack() as undo:
        for part in side.split("+"):
            if part in VELORA:
                velora = lt.apply_velora(model, list(VELORA[part]))
                velora.use_fp32_products()
                undo.callback(velora.remove)
            elif part == "exact":
                undo.callback(lt.apply_exact_savings(model).remove)
            elif part in SAVINGS:
                undo.callback(lt.apply_exact_savings(model, **{name: name == part for name in SAVINGS}).remove)
            elif part.startswith("checkpoint"):
                causal.activation_checkpointing_enable(every_n_layers=int(part.removeprefix("checkpoint")))
                undo.callback(causal.activation_checkpointing_disable)
        yield


def optimizer_of(model: nn.Module) -> lt.Lomo:
    return lt.Lomo([p for p in model.parameters() if p.requires_grad], lr=1e-12)


def trace(model: nn.Module, side: str, tokens: int) -> Measured:
    """The bytes of a side, walked on fake tensors."""
    saved: list[int] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with SavedBytes(model) as counted:
            loss_of(model, batch)
        saved.append(counted.bytes)
        return loss_of(model, batch)

    with applied(model, side):
        plan = plan_run(model, [optimizer_of(model)], batch_size=1, length=tokens, fused=True, loss=loss_of)
        plan_run(model, [optimizer_of(model)], batch_size=1, length=tokens, fused=True, loss=loss)
    return Measured(plan.saved["activations"], saved[0], plan.total)


def real_step(model: nn.Module, batch: dict[str, Tensor], optimizer: lt.Lomo) -> float:
    torch.manual_seed(1)
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss.item()


def measure(model: nn.Module, sides: list[str], tokens: int, rounds: int) -> dict[str, Measured]:
    """Real steps of all sides: one with its bytes counted, then ``rounds`` timed ones, interleaved."""
    found = {side: Measured() for side in sides}
    batch = {"input_ids": torch.randint(1000, (1, tokens), generator=torch.Generator().manual_seed(0))}
    batch["labels"] = batch["input_ids"].clone()
    products = use_fp32_products(model)
    optimizer = optimizer_of(model)
    fused = lt.FusedBackward(optimizer, model=model)
    for side, result in found.items():
        with applied(model, side):
            torch.manual_seed(1)
            with SavedBytes(model) as counted:
                loss_of(model, batch)
            result.autograd_bytes = counted.bytes
            with MemoryTracker(model, [optimizer]) as tracker:
                result.loss = real_step(model, batch, optimizer)
            timeline = tracker.timeline()
            result.activation_bytes = timeline.saved_at_forward_end()["activations"]
            result.peak_bytes = timeline.peak_bytes
        print(f"{side}: {format_bytes(result.activation_bytes)}, loss {result.loss}", flush=True)
    for number in range(rounds):
        for side, result in found.items():
            with applied(model, side):
                began = time.process_time()
                real_step(model, batch, optimizer)
                result.seconds.append(time.process_time() - began)
            print(f"round {number}: {side} {result.seconds[-1]:.1f} s", flush=True)
    fused.remove()
    products.remove()
    return found


def write(write_row: Callable[..., Any], side: str, kind: str, result: Measured, plain: Measured) -> None:
    values: dict[str, Any] = {"side": side, "kind": kind, "loss": "" if result.loss is None else repr(result.loss)}
    if result.seconds:
        ratios = [one / other for one, other in zip(result.seconds, plain.seconds)]
        values |= {
            "seconds": statistics.median(result.seconds),
            "seconds_to_plain": statistics.median(ratios),
            "seconds_to_plain_min": min(ratios),
            "seconds_to_plain_max": max(ratios),
        }
    share = result.activation_bytes / plain.activation_bytes
    write_row(
        **values,
        activation_bytes=result.activation_bytes,
        autograd_bytes=result.autograd_bytes,
        peak_bytes=result.peak_bytes,
        activations_to_plain=share,
    )
    print(
        f"{kind} {side:20} activations {format_bytes(result.activation_bytes):>10} ({share:.3f} of plain)  "
        f"autograd {format_bytes(result.autograd_bytes):>10}  peak {format_bytes(result.peak_bytes):>10}",
        flush=True,
    )


def run(args: argparse.Namespace, method: str) -> None:
    rows = ResultRows("activation_bytes", COLUMNS, args.rows)
    key = {"method": method, "tokens": args.tokens}
    sides = [side for side in METHODS[method] if args.sides is None or side in args.sides]
    write_row = partial(
        rows.append, seed=0, **key, dtype="bfloat16", threads=torch.get_num_threads(), rounds=args.rounds
    )
    model = build(method)
    missing = [side for side in sides if not rows.has(**key, side=side, kind="trace")]
    if missing:
        plain = trace(model, "plain", args.tokens)
        for side in missing:
            write(write_row, side, "trace", trace(model, side, args.tokens), plain)
    if args.rounds:
        missing = [side for side in sides if not rows.has(**key, side=side, kind="step", rounds=args.rounds)]
        # Some at a time, each group beside "plain", so that an interrupted run has written the groups before.
        others = [side for side in missing if side != "plain"]
        for first in range(0, len(others), args.group):
            found = measure(model, ["plain", *others[first : first + args.group]], args.tokens, args.rounds)
            for side, result in found.items():
                if not rows.has(**key, side=side, kind="step", rounds=args.rounds):
                    write(write_row, side, "step", result, found["plain"])


def table(rows: ResultRows, tokens: int) -> str:
    """Every side's real step (the row of the most rounds) as a Markdown table."""
    lines = []
    for method, sides in METHODS.items():
        found = {side: rows.find(method=method, tokens=tokens, side=side, kind="step") for side in sides}
        latest = {side: max(some, key=lambda row: int(row["rounds"])) for side, some in found.items() if some}
        losses: dict[str, set[str]] = {}  # by kind of processor: another one rounds otherwise
        for row in latest.values():
            losses.setdefault(row["cpu"], set()).add(row["loss"])
        for side, row in latest.items():
            bounds = f"{float(row['seconds_to_plain_min']):.2f} to {float(row['seconds_to_plain_max']):.2f}"
            lines.append(
                [
                    method,
                    side,
                    f"{int(row['activation_bytes']) / MIB:,.1f}",
                    f"{100 - 100 * float(row['activations_to_plain']):.1f} %",
                    f"{int(row['peak_bytes']) / MIB:,.0f}",
                    "" if side == "plain" else f"{float(row['seconds_to_plain']):.2f} ({bounds})",
                    "equal" if len(losses[row["cpu"]]) == 1 else row["loss"],
                ]
            )
    headings = ("method", "side", "activations, MiB", "less than plain", "peak, MiB", "time to plain's", "loss")
    return markdown(headings, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=sorted(METHODS), default=sorted(METHODS))
    parser.add_argument("--sides", nargs="+", help="of all sides of the method")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds of real steps; 0: trace bytes alone")
    parser.add_argument("--group", type=int, default=3, help="sides measured together with plain")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", help="another file for the rows")
    parser.add_argument("--table", action="store_true", help="print the table of the rows and stop")
    args = parser.parse_args()
    unknown = sorted(set(args.sides or ()) - {side for sides in METHODS.values() for side in sides})
    if unknown or args.rounds < 0 or args.group < 1:
        parser.error(f"no such side: {', '.join(unknown)}" if unknown else "rounds are >= 0, groups >= 1")
    if args.table:
        print(table(ResultRows("activation_bytes", COLUMNS, args.rows), args.tokens))
        return
    torch.set_num_threads(args.threads)
    for method in args.methods:
        run(args, method)


if __name__ == "__main__":
    main()
