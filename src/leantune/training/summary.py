"""What a run says before and after: the header and the summary."""

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from leantune.memory import LABELS, Plan, format_bytes
from leantune.optim.base import LeanOptimizer
from leantune.training.config import TrainConfig
from leantune.training.data import PreparedData

if TYPE_CHECKING:
    from leantune.training.run import TrainResult
    from leantune.training.trainer import LeanTrainer


def header(
    console: Console, config: TrainConfig, trainer: "LeanTrainer", data: PreparedData, plan: Plan | None
) -> None:
    """Dtypes, methods, what stays exact and why, planned bytes by part."""
    model: Any = trainer.model
    optimizer: Any = trainer.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    table = Table(title="leantune train", show_header=False, title_justify="left")
    table.add_row(
        "model", f"{config.model_name_or_path}: {trained:,} of {total:,} parameters trained ({config.method})"
    )
    compute = "bfloat16 autocast" if config.bf16 else config.dtype
    gradients = "applied and freed inside backward" if config.fused else "kept until the step"
    table.add_row("dtypes", f"weights {config.dtype}, compute {compute}, gradients as the weights ({gradients})")
    table.add_row(
        "optimizer", f"{config.optim}, lr {config.rate:g}, weight decay {config.weight_decay:g} (matrices only)"
    )
    if config.fused:
        bound = config.max_grad_norm or 1.0
        clip = {"per_tensor": f"per tensor at norm {bound:g}", "global": f"global norm {bound:g}, exact, two backwards"}
        table.add_row("clipping", clip.get(config.clip_mode, "none"))
    else:
        norm = trainer.args.max_grad_norm
        table.add_row("clipping", f"global norm {norm:g} (transformers)" if norm else "none")
    table.add_row("loss", "without logits, tiled over the vocabulary" if config.exact_savings else "full logits")
    if config.velora_target_modules:
        table.add_row("VeLoRA", f"{', '.join(config.velora_target_modules)} in {config.velora_num_groups} sub-tokens")
    held = len(data.held_out) if data.held_out is not None else 0
    packed = ", packed" if config.packing else ""
    table.add_row(
        "data", f"{len(data.train):,} rows to train on, {held:,} held out, longest {data.longest} tokens{packed}"
    )
    table.add_row("device", f"{trainer.args.device}, one a process")
    console.print(table)
    for note in [*config.notes, *data.notes]:
        console.print(f"note: {note}", highlight=False)
    if isinstance(optimizer, LeanOptimizer):
        console.print(str(optimizer.report()), highlight=False)
    if plan is not None:
        console.print(plan.table(), highlight=False)


def summary(console: Console, config: TrainConfig, result: "TrainResult") -> None:
    """Where the memory went by part, tokens/s, held-out loss before and after."""
    table = Table(title="memory of one measured step, at its peak", title_justify="left")
    for column in ("part", "bytes"):
        table.add_column(column, justify="right" if column == "bytes" else "left")
    for part, size in result.memory_by_part.items():
        if size:
            table.add_row(LABELS.get(part, part), format_bytes(size))
    table.add_row("total", format_bytes(result.peak_bytes))
    console.print(table)
    if result.velora is not None:
        kept = f"{format_bytes(result.velora.exact_bytes)} of inputs kept as {format_bytes(result.velora.kept_bytes)}"
        console.print(f"VeLoRA: {format_bytes(result.velora.saved_bytes)} saved ({kept})", highlight=False)
    console.print(f"{result.tokens_per_second:,.0f} tokens/s", highlight=False)
    if result.held_out_before is not None and result.held_out_after is not None:
        console.print(f"held-out loss {result.held_out_before:.4f} -> {result.held_out_after:.4f}", highlight=False)
    console.print(f"written to {result.output_dir}", highlight=False)
