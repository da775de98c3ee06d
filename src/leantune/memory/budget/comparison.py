"""Well-known ways to train the same model side by side with this package's, each by closed form."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from leantune.memory.budget.run_stages import ADAPTERS, StagedBytes, stage_bytes
from leantune.memory.budget.sharding import ALONE, Parallel
from leantune.memory.closed_form.model_shape import ModelShape
from leantune.memory.closed_form.settings import EXACT_SAVINGS, NO_SAVINGS, RunSettings
from leantune.memory.parts import GRADIENTS, OPTIMIZER_STATES, WEIGHTS
from leantune.memory.sizes import format_bytes


@dataclass(frozen=True)
class Compared:
    """One way and what it needs at its peak."""

    name: str
    staged: StagedBytes

    def row(self, budget: int | None) -> tuple[str, ...]:
        """(name, weights, states, gradients, the rest, total, verdict) as text."""
        parts = self.staged.peak.parts
        weights = parts[WEIGHTS] + parts[ADAPTERS]
        counted = (weights, parts[OPTIMIZER_STATES], parts[GRADIENTS])
        total = self.staged.peak.total
        verdict = "" if budget is None else ("fits" if total <= budget else "does not fit")
        return (self.name, *map(format_bytes, (*counted, total - sum(counted), total)), verdict)


HEADINGS = ("method", "weights", "states", "gradients", "rest", "total", "")


def compare(shape: ModelShape, settings: RunSettings, parallel: Parallel = ALONE) -> list[Compared]:
    """AdamW in fp32 and in bfloat16, 8-bit AdamW, LoRA, QLoRA, LOMO and the ternary states, at one batch and length.

    All with the same checkpointing; the others with whole logits and an ordinary backward, ours without either and with
    all exact savings.
    """
    theirs = replace(
        settings, method="full", optimizer_options={}, fused=False, two_passes=False, accumulate=None,
        velora_targets=(), **NO_SAVINGS,
    )  # fmt: skip
    ours = replace(theirs, fused=settings.micro_batches == 1, dtype="bfloat16", **EXACT_SAVINGS)
    ways = {
        "AdamW, fp32": replace(theirs, dtype="float32", optim="adamw_torch_fused"),
        "AdamW, bf16": replace(theirs, dtype="bfloat16", optim="adamw_torch_fused"),
        "AdamW 8-bit, bf16": replace(theirs, dtype="bfloat16", optim="adamw_bnb_8bit"),
        "LoRA": replace(theirs, dtype="bfloat16", method="lora", optim="adamw_torch_fused"),
        "QLoRA": replace(theirs, dtype="bfloat16", method="qlora", optim="adamw_torch_fused"),
        "LOMO": replace(ours, optim="lomo"),
        "leantune, ternary": replace(ours, optim="ternary_adamw"),
        "leantune, one-sparse": replace(ours, optim="taco_one_sparse"),
    }
    if shape.experts:
        del ways["QLoRA"]
    return [Compared(name, stage_bytes(shape, way, parallel)) for name, way in ways.items()]


def comparison_rows(compared: Sequence[Compared], budget: int | None) -> list[tuple[str, ...]]:
    """Headings and rows as text."""
    return [HEADINGS, *(one.row(budget) for one in compared)]
