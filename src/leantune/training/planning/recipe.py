"""``method: auto``: the first rung of a ladder that fits the device with room to spare, and why.

From the most faithful training to the smallest: full AdamW in fp32, the ternary states with more and more recomputed,
adapters, adapters over a 4-bit base. What changes the training in another way (VeLoRA, one-sparse, LOMO, shorter rows)
is offered by the plan's advice and never chosen here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from leantune.errors import InvalidArgumentError
from leantune.memory.budget.run_stages import stage_bytes
from leantune.memory.budget.sharding import ALONE, Parallel
from leantune.memory.closed_form.model_shape import ModelShape
from leantune.memory.closed_form.settings import EXACT_SAVINGS, LOSS_ALONE, RunSettings
from leantune.memory.sizes import GIB, format_bytes

SPARE_SHARE = 0.05
EVERY_N_LAYERS = 2


@dataclass(frozen=True)
class Rung:
    """One way to train, from the top of the ladder down."""

    name: str
    settings: RunSettings
    keys: dict[str, object]
    """What a config would say."""
    cost: str
    """Against the rung above."""


@dataclass(frozen=True)
class Recipe:
    """The rung that was chosen: why, what it costs, and what comes next if it turns out too large."""

    rung: Rung
    total: int
    spare: int
    why: str
    next: str

    def __str__(self) -> str:
        return f"{self.rung.name}: {self.why}; {self.rung.cost}. Next: {self.next}"


def ladder(shape: ModelShape, settings: RunSettings) -> Iterator[Rung]:
    """All rungs for this model at the settings' batch and length, the most faithful first."""
    plain = replace(
        settings, method="full", optimizer_options={}, velora_targets=(), checkpoint_every=0, two_passes=False,
        accumulate=None, **EXACT_SAVINGS,
    )  # fmt: skip
    yield Rung(
        "full AdamW in fp32",
        replace(plain, dtype="float32", optim="adamw", fused=False),
        {"method": "full", "optim": "adamw", "dtype": "float32", "fused_backward": False},
        "it costs no quality",
    )
    kept = {"carry_rank": 4, "momentum_planes": 1, "block_size": 128, "master_bits": 24}
    yield Rung(
        "full, ternary states, bf16 weights with an 8-bit remainder",
        replace(plain, dtype="bfloat16", optim="ternary_adamw", optimizer_options=kept, fused=False),
        {"method": "full", "optim": "ternary_adamw", "master_bits": 24, "fused_backward": False},
        "states are trits",
    )
    fused = replace(plain, dtype="bfloat16", optim="ternary_adamw", fused=settings.micro_batches == 1)
    keys: dict[str, object] = {"method": "full", "optim": "ternary_adamw", "gradient_checkpointing": True}
    yield Rung(
        f"full, ternary states, fused backward, every {EVERY_N_LAYERS}nd block recomputed",
        replace(fused, checkpoint_every=EVERY_N_LAYERS),
        keys | {"gradient_checkpointing_kwargs": {"every_n_layers": EVERY_N_LAYERS}},
        "weights are rounded stochastically, clipping is per tensor, about a sixth more time",
    )
    yield Rung(
        "full, ternary states, fused backward, every block recomputed",
        replace(fused, checkpoint_every=1, **LOSS_ALONE),
        keys,
        "about a third more time than without recomputing",
    )
    adapted = replace(
        plain, dtype="bfloat16", optim="adamw", fused=False, lora_rank=16, checkpoint_every=1, **LOSS_ALONE
    )
    adapter_keys: dict[str, object] = {"lora_r": 16, "optim": "adamw", "gradient_checkpointing": True}
    yield Rung(
        "LoRA", replace(adapted, method="lora"), {"method": "lora", **adapter_keys}, "adapters alone are trained"
    )
    if not shape.experts:
        yield Rung(
            "QLoRA (nf4, nested)",
            replace(adapted, method="qlora"),
            {"method": "qlora", **adapter_keys},
            "adapters are trained over weights of 4 bits; products are slower",
        )


def choose_recipe(shape: ModelShape, settings: RunSettings, budget: int, parallel: Parallel = ALONE) -> Recipe:
    """The first rung that leaves at least 1 GiB, or 5 % of the budget, free.

    Args:
        shape, settings: the model, and the batch and length to train at; what else they say is replaced.
        budget: bytes of the device.

    Raises InvalidArgumentError where not even the last rung fits, naming it, its largest part and what is missing.
    """
    spare_wanted = min(GIB, int(SPARE_SHARE * budget))
    rungs = list(ladder(shape, settings))
    passed = ""
    for place, rung in enumerate(rungs):
        peak = stage_bytes(shape, rung.settings, parallel).peak
        spare = budget - peak.total
        if spare >= spare_wanted:
            why = f"it takes {format_bytes(peak.total)} of {format_bytes(budget)}"
            why += f" at {rung.settings.where}{parallel.where}" + (f"; {passed}" if passed else "")
            following = (
                rungs[place + 1].name if place + 1 < len(rungs) else "a smaller batch, shorter rows, more devices"
            )
            return Recipe(rung, peak.total, spare, why, following)
        short = spare_wanted - spare
        passed = f"{rung.name} would take {format_bytes(peak.total)}, {format_bytes(short)} more than leaves room"
    part = max(peak.parts, key=lambda name: peak.parts[name])
    raise InvalidArgumentError(
        f"method: auto: nothing fits {format_bytes(budget)} at {settings.where}: even {rungs[-1].name} takes "
        f"{format_bytes(peak.total)}, {format_bytes(peak.parts[part])} of it {part}. Write a smaller "
        "per_device_train_batch_size or max_length, or train on more devices"
    )
