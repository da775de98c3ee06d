"""What would make a run smaller: each change with the bytes it saves and what it costs, cheapest first.

Where a model is in closed form, savings are those of a plan of the changed run; elsewhere the bytes that a change works
on are named.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from leantune.errors import InvalidArgumentError
from leantune.memory.budget.run_stages import peak_bytes
from leantune.memory.budget.sharding import Parallel
from leantune.memory.closed_form.model_shape import ModelShape
from leantune.memory.closed_form.settings import EXACT_SAVINGS, LOSS_ALONE, RunSettings
from leantune.memory.parts import (
    ACTIVATIONS,
    GRADIENTS,
    LABELS,
    LOSS,
    OPTIMIZER_STATES,
    RECOMPUTE,
    TEMPORARIES,
    WEIGHTS,
)
from leantune.memory.sizes import format_bytes

FREE, SPEED, QUALITY, DATA = 0, 1, 2, 3
PASSING = (ACTIVATIONS, RECOMPUTE, LOSS, TEMPORARIES)
"""Parts that grow with a batch."""


@dataclass(frozen=True)
class Advice:
    """One change: what to write, bytes saved at the peak, and its cost in words."""

    change: str
    saved: int
    cost: str
    rank: int
    """0: costs nothing, 1: time, 2: another training, 3: less of the data."""
    suffices: bool
    """With this change alone the memory budget holds."""

    def __str__(self) -> str:
        enough = "; this alone is enough" if self.suffices else ""
        return f"{self.change}: saves {format_bytes(self.saved)}; {self.cost}{enough}"


@dataclass(frozen=True)
class Change:
    """A candidate."""

    change: str
    settings: RunSettings
    cost: str
    rank: int
    works_on: tuple[str, ...]
    """Parts of a step that it makes smaller."""


_SIBLINGS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""All that read the input of attention or of the MLP: it is kept for one as for all."""


def advise(
    shape: ModelShape, settings: RunSettings, parallel: Parallel, total: int, budget: int | None
) -> tuple[Advice, ...]:
    """Every change that saves something, cheapest kind first, within a kind the largest saving first."""
    found = []
    for candidate in changes(settings, experts=bool(shape.experts)):
        try:
            after = peak_bytes(shape, candidate.settings, parallel)
        except InvalidArgumentError:
            continue
        if after < total:
            enough = budget is not None and after <= budget < total
            found.append(Advice(candidate.change, total - after, candidate.cost, candidate.rank, enough))
    return tuple(sorted(found, key=lambda advice: (advice.rank, -advice.saved)))


def advise_by_parts(settings: RunSettings, parts: Mapping[str, int]) -> tuple[str, ...]:
    """The same changes for a model that is not in closed form, with the bytes of ``parts`` (those of its peak) that
    each works on: in the same order, only those that work on something."""
    found = []
    for candidate in changes(settings):
        size = sum(parts.get(part, 0) for part in candidate.works_on)
        if size:
            names = ", ".join(LABELS[part] for part in candidate.works_on if parts.get(part))
            text = f"{candidate.change}: works on {format_bytes(size)} ({names}); {candidate.cost}"
            found.append((candidate.rank, -size, text))
    return tuple(text for _, _, text in sorted(found))


def changes(settings: RunSettings, *, experts: bool = False) -> Iterator[Change]:
    """All changes that a run with these settings can make. ``experts``: the model is a mixture of them."""
    savings = LOSS_ALONE if settings.checkpoint_every == 1 else EXACT_SAVINGS
    missing = [name for name, wanted in savings.items() if wanted and not getattr(settings, name)]
    if missing:
        yield Change(
            "exact_savings: true",
            replace(settings, **savings),
            "no number changes; elementwise products are made twice",
            FREE,
            (*((LOSS,) if "exact_loss" in missing else ()), *((ACTIVATIONS,) if missing != ["exact_loss"] else ())),
        )
    ours = settings.optim in ("ternary_adamw", "adamw", "lomo", "adalomo", "taco_one_sparse")
    if ours and not settings.fused and settings.micro_batches == 1:
        yield Change(
            "fused_backward: true",
            replace(settings, fused=True),
            "clips per tensor; exact global clipping takes a second backward",
            FREE,
            (GRADIENTS,),
        )
    yield from _time_for_memory(settings)
    yield from _other_trainings(settings, experts)
    if settings.length > 64:
        yield Change(
            f"max_length: {settings.length // 2}",
            replace(settings, length=settings.length // 2),
            "longer rows are cut",
            DATA,
            PASSING,
        )


def _time_for_memory(settings: RunSettings) -> Iterator[Change]:
    every = settings.checkpoint_every
    if every == 0 or every > 2:
        yield Change(
            "gradient_checkpointing: true, gradient_checkpointing_kwargs: {every_n_layers: 2}",
            replace(settings, checkpoint_every=2, velora_targets=()),
            "every second block runs forward twice: about a sixth more time",
            SPEED,
            (ACTIVATIONS,),
        )
    if every != 1:
        yield Change(
            "gradient_checkpointing: true",
            replace(settings, checkpoint_every=1, velora_targets=(), **(LOSS_ALONE if settings.exact_loss else {})),
            "every block runs forward twice: about a third more time",
            SPEED,
            (ACTIVATIONS,),
        )
    if settings.batch_size > 1:
        half = settings.batch_size // 2
        yield Change(
            f"per_device_train_batch_size: {half}",
            replace(settings, batch_size=half),
            "smaller steps; a little less throughput",
            SPEED,
            PASSING,
        )


def _other_trainings(settings: RunSettings, experts: bool) -> Iterator[Change]:
    if settings.dtype == "float32":
        yield Change(
            "dtype: bfloat16",
            replace(settings, dtype="bfloat16"),
            "weights of 16 bits, stochastically rounded",
            QUALITY,
            (WEIGHTS, GRADIENTS, ACTIVATIONS),
        )
    if settings.method == "full":
        plain = replace(settings, optimizer_options={}, fused=True, micro_batches=1)
        if settings.optim != "ternary_adamw":
            yield Change(
                "optim: ternary_adamw",
                replace(plain, optim="ternary_adamw"),
                "states as trits; AdamW's quality so far",
                QUALITY,
                (OPTIMIZER_STATES, GRADIENTS),
            )
        yield Change(
            "optim: taco_one_sparse", replace(plain, optim="taco_one_sparse"), "few weights move a step; needs a rate",
            QUALITY, (OPTIMIZER_STATES, GRADIENTS),
        )  # fmt: skip
        yield Change(
            "optim: lomo",
            replace(plain, optim="lomo"),
            "no momentum; needs a rate",
            QUALITY,
            (OPTIMIZER_STATES, GRADIENTS),
        )
        if not settings.checkpoint_every and not experts and not settings.velora_targets:
            # Attention keeps o_proj's input anyway, and down_proj's is made again under the saving of products.
            targets = _SIBLINGS if settings.swiglu else ("down_proj",)
            yield Change(
                f"velora_target_modules: {', '.join(targets)}",
                replace(settings, velora_targets=targets),
                "gradients of these layers are approximate",
                QUALITY,
                (ACTIVATIONS,),
            )
        adapted = replace(settings, method="lora", optimizer_options={}, velora_targets=())
        yield Change(
            "method: lora", adapted, "trains adapters, not the weights", QUALITY, (OPTIMIZER_STATES, GRADIENTS)
        )
    if settings.method != "qlora" and not experts:
        adapted = replace(settings, method="qlora", optimizer_options={}, velora_targets=())
        yield Change(
            "method: qlora",
            adapted,
            "trains adapters over weights of 4 bits; slower products",
            QUALITY,
            (WEIGHTS, OPTIMIZER_STATES, GRADIENTS),
        )
