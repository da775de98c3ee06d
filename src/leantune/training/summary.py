"""What a run says before and after: the header and the summary."""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from leantune.kernels import gpu, native
from leantune.memory import LABELS, Plan, format_bytes
from leantune.memory.quantised import elements, storage
from leantune.optim.base import LeanOptimizer
from leantune.optim.ternary_adamw import TernaryAdamW
from leantune.training.config import TrainConfig
from leantune.training.data.load import PreparedData
from leantune.training.quantised_base import compute_dtype, described
from leantune.training.router_loss import router_coefficient
from leantune.training.samples import stopped_share, stopping
from leantune.whole_file import write_whole

if TYPE_CHECKING:
    from leantune.training.exact_savings import RunSavings
    from leantune.training.run import TrainResult
    from leantune.training.trainer import LeanTrainer


def facts(config: TrainConfig, trainer: "LeanTrainer", data: PreparedData, savings: "RunSavings") -> dict[str, str]:
    """What a run does, in words by subject: model, dtypes, optimizer, clipping, exact savings, data..."""
    model: Any = trainer.model
    optimizer: Any = trainer.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(elements(p) for p in model.parameters())
    found = {
        "model": f"{config.model_name_or_path}: {trained:,} of {total:,} parameters trained ({config.method})",
        **dtypes(config, model, optimizer),
    }
    if base := described(model):
        found["base"] = base
    found["optimizer"] = f"{config.optim}, lr {config.rate:g}, weight decay {config.weight_decay:g} (matrices only)"
    if isinstance(optimizer, TernaryAdamW):
        found["update"] = native.status() if trainer.args.device.type == "cpu" else gpu.status()
    if config.fused:
        bound = config.max_grad_norm or 1.0
        clip = {"per_tensor": f"per tensor at norm {bound:g}", "global": f"global norm {bound:g}, exact, two backwards"}
        found["clipping"] = clip.get(config.clip_mode, "none")
    else:
        norm = trainer.args.max_grad_norm
        found["clipping"] = f"global norm {norm:g} (transformers)" if norm else "none"
    if router_coefficient(model) is not None:
        found["router"] = "no balancing loss is added, as in transformers' own trainer (TRL's adds it)"
    found["exact savings"] = "\n".join(savings.lines())
    if config.velora_target_modules:
        found["VeLoRA"] = _velora(config)
    if config.gradient_checkpointing:
        every = config.checkpoint_every
        found["checkpointing"] = "every block" if every == 1 else f"one block of {every}"
    held = len(data.held_out) if data.held_out is not None else 0
    packed = ", packed" if config.packing else ""
    rows = "rows read as they are needed" if data.rows is None else f"{data.rows:,} rows to train on"
    found["data"] = f"{rows}, {held:,} held out, longest {data.longest} tokens{packed}"
    found["device"] = f"{trainer.args.device}, one a process{trainer.processes.described(config)}"
    return found


def header(
    console: Console,
    config: TrainConfig,
    trainer: "LeanTrainer",
    data: PreparedData,
    plan: Plan | None,
    found: dict[str, str],
) -> None:
    """The `facts` that were ``found``, what stays exact and why, planned bytes by part."""
    optimizer: Any = trainer.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)
    table = Table(title="leantune train", show_header=False, title_justify="left")
    for name, value in found.items():
        table.add_row(name, value)
    console.print(table)
    for note in [*config.notes, *data.notes]:
        console.print(f"note: {note}", highlight=False)
    if isinstance(optimizer, LeanOptimizer):
        console.print(str(optimizer.report()), highlight=False)
    if plan is not None:
        console.print(plan.table(), highlight=False)


def _velora(config: TrainConfig) -> str:
    text = f"{', '.join(config.velora_target_modules or ())} in {config.velora_num_groups} sub-tokens"
    if config.velora_factored:
        text += ", gradients and states in that size too"
    if config.velora_refresh_every is not None:
        text += f", directions set anew every {config.velora_refresh_every} forwards"
    return text


def dtypes(config: TrainConfig, model: Any, optimizer: Any) -> dict[str, str]:
    """Dtypes of weights, compute, gradients and optimizer states, as they are and not as they were asked for."""
    weights: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    for param in model.parameters():
        name = storage(param)
        weights[name] += elements(param)
        trained[name] += param.numel() if param.requires_grad else 0
    trained = +trained
    kept = "applied and freed inside backward" if config.fused else "kept until the step"
    if config.accumulate is not None:
        kept = f"summed in {config.accumulate} until the last micro-batch"
    if isinstance(optimizer, LeanOptimizer):
        storages = Counter(row.storage for row in optimizer.report().rows)
        states = ", ".join(f"{storage} ({count} tensors)" for storage, count in storages.most_common())
    else:
        states = f"as {config.optim} keeps them: the dtype of the weight, for torch's"
    return {
        "weights": ", ".join(f"{name} ({count:,})" for name, count in weights.most_common()),
        "compute": _computed_in(config, weights),
        "gradients": f"{', '.join(trained)}, {kept}",
        "states": states,
    }


def _computed_in(config: TrainConfig, weights: Counter[str]) -> str:
    if config.bf16:
        return "bfloat16 autocast"
    dense = " and ".join(name for name in weights if name not in ("nf4", "fp4", "int8"))
    if config.method != "qlora":
        return dense
    return f"{dense}; 4-bit weights in {str(compute_dtype(config)).removeprefix('torch.')}"


def write_summary(config: TrainConfig, result: "TrainResult", folder: Path) -> None:
    """summary.json in ``folder``: the figures that `summary` prints. Sizes in bytes."""
    figures = {
        "model": config.model_name_or_path,
        "method": config.method,
        "optim": config.optim,
        "fused_backward": config.fused,
        "clip": config.clip_mode
        if config.fused
        else "global"
        if config.max_grad_norm is None
        else config.max_grad_norm,
        "steps": max((row["step"] for row in result.log), default=0),
        "begun_at": result.begun_at,
        "held_out_before": result.held_out_before,
        "held_out_after": result.held_out_after,
        "answers": len(result.samples),
        "answers_stopped": stopped_share(result.samples),
        "tokens_per_second": result.tokens_per_second,
        "peak_bytes": result.peak_bytes or None,
        "planned_peak_bytes": result.plan.total if result.plan else None,
        "memory_by_part_at_peak": result.memory_by_part,
        "velora_saved_bytes": result.velora.saved_bytes if result.velora else None,
    }
    write_whole(folder / "summary.json", json.dumps(figures, indent=2) + "\n")


def summary(console: Console, config: TrainConfig, result: "TrainResult") -> None:
    """Where the memory went by part, tokens/s, held-out loss before and after."""
    table = Table(title="memory of one measured step, at its peak", title_justify="left")
    for column in ("part", "bytes"):
        table.add_column(column, justify="right" if column == "bytes" else "left")
    for part, size in result.memory_by_part.items():
        if size:
            table.add_row(LABELS.get(part, part), format_bytes(size))
    table.add_row("total", format_bytes(result.peak_bytes))
    if result.memory_by_part:
        console.print(table)
    if result.velora is not None:
        kept = f"{format_bytes(result.velora.exact_bytes)} of inputs kept as {format_bytes(result.velora.kept_bytes)}"
        console.print(f"VeLoRA: {format_bytes(result.velora.saved_bytes)} saved ({kept})", highlight=False)
    console.print(f"{result.tokens_per_second:,.0f} tokens/s", highlight=False)
    if result.held_out_before is not None and result.held_out_after is not None:
        begun = f" at step {result.begun_at}, where this run went on" if result.begun_at else ""
        console.print(
            f"held-out loss {result.held_out_before:.4f}{begun} -> {result.held_out_after:.4f}", highlight=False
        )
    if result.samples:
        console.print(stopping(result.samples, config.sample_tokens), highlight=False)
    console.print(f"written to {result.output_dir}", highlight=False)
