"""How far the plan of a step is from what the step then uses: real models, real steps, every way of training.

    python benchmarks/plan_accuracy.py           # what is not measured yet, then the table; resumes where it stopped
    python benchmarks/plan_accuracy.py --table   # the table alone
    python benchmarks/plan_accuracy.py --rows /tmp/rows.csv --models tiny

Each row is one configuration: planned by walking the step on fake tensors (`plan_run`), measured by the tensor tracker
on the second step, and, for the larger model, by the growth of the process's resident memory in a third step that is
not tracked. Models: "tiny", a random Llama of 3 layers, 128 wide; "smollm-4", SmolLM2-135M cut to its first 4 layers
with its whole vocabulary. Errors are (planned - measured) / measured.
"""

import argparse
import gc
import itertools
import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rows import ResultRows
from torch import nn

import leantune as lt
from leantune.kernels.half_linear import use_fp32_products
from leantune.memory import MemoryTracker, plan_run, process_peak, reset_process_peak
from leantune.memory.measured.process import return_freed_memory, return_large_frees
from leantune.memory.traced.trace import exact_loss, token_batch

COLUMNS = (
    "model", "method", "optim", "fused", "velora", "checkpointing", "batch", "length",
    "planned", "measured", "error", "worst_part", "worst_part_error", "process_growth",
)  # fmt: skip
SHARE = 0.02
"""Parts under this share of the peak do not compete for "worst_part"."""
SCRATCH = 32 << 20
"""What a process takes beside its tensors, whatever they are: packed operands of matrix products, the allocator's
slack, autograd's bookkeeping. Found here: 20 to 50 MiB on two cores."""


@dataclass(frozen=True)
class Case:
    """One configuration."""

    model: str
    method: str
    optim: str
    fused: bool
    velora: bool
    checkpointing: bool
    batch: int
    length: int


def cases() -> list[Case]:
    """At least 24: full and LoRA, every optimizer, fused or not, VeLoRA, checkpointing, two lengths, two models."""
    found = []
    for model, (batch, length) in itertools.product(("tiny", "smollm-4"), ((2, 32), (1, 192))):
        found += [Case(model, "full", optim, True, False, False, batch, length) for optim in OURS]
        found += [
            Case(model, "full", "adamw", False, False, False, batch, length),
            Case(model, "full", "torch_adamw", False, False, False, batch, length),
            Case(model, "full", "ternary_adamw", True, True, False, batch, length),
            Case(model, "full", "ternary_adamw", True, False, True, batch, length),
            Case(model, "full", "ternary_adamw", False, False, True, batch, length),
            Case(model, "lora", "ternary_adamw", True, False, False, batch, length),
            Case(model, "lora", "adamw", False, False, True, batch, length),
        ]
    return found


OURS: dict[str, Callable[[Any], Any]] = {
    "ternary_adamw": lambda p: lt.TernaryAdamW(p, lr=1e-5),
    "adamw": lambda p: lt.AdamW(p, lr=1e-5),
    "lomo": lambda p: lt.Lomo(p, lr=1e-4),
    "adalomo": lambda p: lt.AdaLomo(p, lr=1e-5),
    "taco_one_sparse": lambda p: lt.TacoOneSparse(p, lr=1e-5),
}


def build_model(case: Case) -> tuple[nn.Module, nn.Module]:
    """(the model that trains, the causal language model inside it)."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if case.model == "tiny":
        config = LlamaConfig(
            hidden_size=128, intermediate_size=320, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=1024, tie_word_embeddings=True,
        )  # fmt: skip
        inner: Any = LlamaForCausalLM(config).to(torch.bfloat16)
    else:
        from leantune.training.demo_model import demo_model_path

        inner = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.bfloat16)
        inner.model.layers = inner.model.layers[:4]
        inner.config.num_hidden_layers = 4
        inner.config.layer_types = None
    outer = inner
    if case.method == "lora":
        from peft import LoraConfig, get_peft_model

        outer = get_peft_model(inner, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    if case.checkpointing:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    velora = lt.apply_velora(inner, ["down_proj"], 32) if case.velora else None
    use_fp32_products(outer)
    if velora is not None:
        velora.use_fp32_products()
    return outer.train(), inner


def measure(case: Case) -> dict[str, Any]:
    """Plan a step, take two, and compare."""
    gc.collect()
    return_freed_memory()
    before = process_peak().current
    model, inner = build_model(case)
    trained = [p for p in model.parameters() if p.requires_grad]
    torch_adamw = case.optim == "torch_adamw"
    optimizer = torch.optim.AdamW(trained, lr=1e-5, foreach=False) if torch_adamw else OURS[case.optim](trained)
    fused = lt.FusedBackward(optimizer, model=model) if case.fused else None
    batch = token_batch(case.batch, case.length, torch.device("cpu"))

    def step() -> None:
        exact_loss(inner, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    plan = plan_run(inner, optimizer, batch_size=case.batch, length=case.length, fused=case.fused)
    tracker = MemoryTracker(model, optimizer)
    with tracker:
        step()
    found = tracker.timeline()
    gc.collect()
    reset_process_peak()
    step()
    growth = process_peak().peak - before
    if fused is not None:
        fused.remove()
    peaks = found.part_peaks()
    large = {part: size for part, size in peaks.items() if size >= SHARE * found.peak_bytes}
    errors = {part: (plan.parts[part] - size) / size for part, size in large.items()}
    worst = max(errors, key=lambda part: abs(errors[part]))
    return {
        "planned": plan.total,
        "measured": found.peak_bytes,
        "error": (plan.total - found.peak_bytes) / found.peak_bytes,
        "worst_part": worst,
        "worst_part_error": errors[worst],
        "process_growth": growth if case.model != "tiny" else "",
    }


def warm_up() -> None:
    """What the first run of a process takes for good (libraries, peft among them) belongs to no configuration."""
    for method in ("full", "lora"):
        measure(Case("smollm-4", method, "lomo", True, False, False, 1, 32))


def print_table(rows: ResultRows) -> None:
    """Every row, then the errors together."""
    found = rows.read()
    print("| model | method | optimizer | fused | VeLoRA | ckpt | batch x length | planned, MiB | measured | error |")
    print("|---|---|---|---|---|---|---|---:|---:|---:|")
    for row in found:
        flags = " | ".join("yes" if row[name] == "True" else "no" for name in ("fused", "velora", "checkpointing"))
        sizes = " | ".join(f"{int(row[name]) / 2**20:.2f}" for name in ("planned", "measured"))
        where = f"{row['batch']} x {row['length']}"
        names = f"{row['model']} | {row['method']} | {row['optim']}"
        print(f"| {names} | {flags} | {where} | {sizes} | {100 * float(row['error']):+.2f} % |")
    errors = [abs(float(row["error"])) for row in found]
    grown = [int(row["process_growth"]) / int(row["measured"]) - 1 for row in found if row["process_growth"]]
    if errors:
        print(f"\n{len(errors)} configurations: median error {100 * statistics.median(errors):.2f} %, ", end="")
        print(f"worst {100 * max(errors):.2f} %")
    if grown:
        spread = f"{100 * min(grown):+.1f} to {100 * max(grown):+.1f} %"
        print(f"the process grew by the measured tensors {100 * statistics.median(grown):+.1f} % (median; {spread})")
        pairs = [(int(row["process_growth"]), row) for row in found if row["process_growth"]]
        beside = [(growth - int(row["measured"])) / 2**20 for growth, row in pairs]
        off = [abs(int(row["planned"]) + SCRATCH - growth) / growth for growth, row in pairs]
        print(
            f"beside tensors it held {min(beside):.0f} to {max(beside):.0f} MiB; plan and {SCRATCH >> 20} MiB together "
            f"are off by {100 * statistics.median(off):.1f} % of its growth (median; worst {100 * max(off):.1f} %)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=None, help="CSV file of the rows; for rehearsals")
    parser.add_argument("--models", default="tiny,smollm-4")
    parser.add_argument("--table", action="store_true", help="print the table of what is measured, and stop")
    options = parser.parse_args()
    rows = ResultRows("plan_accuracy", COLUMNS, options.rows)
    warnings.simplefilter("ignore", FutureWarning)
    return_large_frees()
    warm = False
    for case in cases() if not options.table else ():
        if case.model in options.models.split(",") and not rows.has(**asdict(case)):
            if case.model != "tiny" and not warm:
                warm_up()
                warm = True
            row = rows.append(seed=0, **asdict(case), **measure(case))
            print(f"{case}: {100 * float(row['error']):+.2f} %", flush=True)
    print_table(rows)


if __name__ == "__main__":
    main()
