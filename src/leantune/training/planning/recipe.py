"""``method: auto``: the first rung of a ladder that fits the device with room to spare, and why.

From the most faithful training to the smallest: full AdamW in fp32, the ternary states with more and more recomputed
and fewer rows a step, adapters, adapters over a 4-bit base. Keys that the user set are kept: a rung that cannot work
with them is passed over. What changes the training in another way (VeLoRA, one-sparse, LOMO, packing, shorter rows) is
offered by the plan's advice and never chosen here.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from leantune.errors import ConfigError, InvalidArgumentError
from leantune.memory.budget.run_stages import PART_LABELS, Stage
from leantune.memory.sizes import GIB, format_bytes
from leantune.training.config import LORA_METHODS, TrainConfig
from leantune.training.config.checks import problems_of

SPARE_SHARE = 0.05
EVERY_N_LAYERS = 2
_SOME_RECOMPUTED = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"every_n_layers": EVERY_N_LAYERS},
}
_FP32 = {"method": "full", "optim": "adamw", "dtype": "float32", "fused_backward": False}
_REMAINDER = {"method": "full", "optim": "ternary_adamw", "master_bits": 24, "fused_backward": False}
_FUSED = {"method": "full", "optim": "ternary_adamw"}
_ALL_RECOMPUTED = _FUSED | {"gradient_checkpointing": True}
_FULL: tuple[tuple[dict[str, Any], str], ...] = (
    (_FP32, "no quality; products in fp32 are slower than 16-bit ones on a GPU"),
    (_REMAINDER, "optimizer states are trits"),
    (
        _FUSED | _SOME_RECOMPUTED,
        "weights are rounded stochastically, clipping is per tensor, about a sixth more time",
    ),
    (_ALL_RECOMPUTED, "the same, and about a third more time than without recomputing"),
)
_ADAPTED: tuple[tuple[str, str], ...] = (
    ("lora", "adapters alone are trained"),
    ("qlora", "adapters are trained over weights of 4 bits; products are slower"),
)

_NOT_KEPT = frozenset({"memory_budget", "method", "force", "resume", "output_dir"})
"""Keys that say nothing of how a run trains."""


@dataclass(frozen=True)
class Rung:
    """One way to train: the whole config, and its cost against the rung above in words."""

    config: TrainConfig
    cost: str

    @property
    def name(self) -> str:
        """What it is, from its config. Example: "full, ternary states, fused backward, every block recomputed"."""
        c = self.config
        optim = {"ternary_adamw": "ternary states", "adamw": "AdamW"}.get(c.optim, c.optim)
        words = {"lora": ["LoRA"], "qlora": ["QLoRA (4-bit base)"]}.get(c.method, [c.method, optim])
        if c.method == "full":
            words.append({"float32": "fp32 weights", "bfloat16": "bf16 weights"}.get(c.dtype, f"{c.dtype} weights"))
        if c.master_bits is not None:
            words[-1] += f" with {c.master_bits - 16} more bits"
        if c.fused and c.method == "full":
            words.append("fused backward")
        if c.gradient_checkpointing:
            every = (c.extra.get("gradient_checkpointing_kwargs") or {}).get("every_n_layers", 1)
            words.append("every block recomputed" if every == 1 else f"every {every}nd block recomputed")
        rows, steps = c.per_device_train_batch_size, c.gradient_accumulation_steps
        words.append(f"{rows} row{'s' if rows > 1 else ''}" + (f" x {steps} a step" if steps > 1 else " a step"))
        return ", ".join(words)


@dataclass(frozen=True)
class Recipe:
    """The rung that was chosen: why, what it costs, and what comes next if it turns out too large."""

    rung: Rung
    peak: Stage
    where: str
    budget: int
    passed: str
    """Of the rung before, what it would have needed; empty where the first was taken."""
    next: str
    kept: tuple[str, ...]
    """Keys the user set."""

    @property
    def total(self) -> int:
        """Bytes on the device at the run's peak."""
        return self.peak.total

    @property
    def spare(self) -> int:
        """Bytes of the budget that stay free; negative where not even the last rung fits."""
        return self.budget - self.total

    @property
    def lines(self) -> tuple[str, ...]:
        """Five lines: chosen, because, costs, next best, you set."""
        size, budget = format_bytes(self.total), format_bytes(self.budget)
        if self.spare >= 0:
            why = f"it needs {size} of {budget} at {self.where}"
        else:
            part = max(self.peak.parts, key=lambda name: self.peak.parts[name])
            most = f"{format_bytes(self.peak.parts[part])} of it {PART_LABELS[part]}"
            why = f"nothing fits {budget}: even this needs {size} at {self.where}, {most}"
        return (
            f"chosen: {self.rung.name}",
            f"because: {why}" + (f"; {self.passed}" if self.passed else ""),
            f"costs: {self.rung.cost}",
            f"next best: {self.next}",
            f"you set: {', '.join(self.kept) if self.kept else 'nothing'}",
        )

    def __str__(self) -> str:
        return "\n".join(self.lines)


def ladder(config: TrainConfig) -> Iterator[Rung]:
    """All rungs that can work with the keys ``config.given``, the most faithful first.

    Fewer rows a step are tried where the user set none: down to one for the last of the full ones, which a fused
    backward cannot sum over micro-batches; under adapters as many micro-batches make up for them.
    """
    rows, steps = config.per_device_train_batch_size, config.gradient_accumulation_steps
    fewer = [] if config.sets("per_device_train_batch_size") else _halves(rows)
    unfused = {"fused_backward": False} if steps > 1 and config.accumulate is None else {}
    wanted = [(keys | unfused, cost) for keys, cost in _FULL]
    wanted += [
        (
            _ALL_RECOMPUTED | unfused | {"per_device_train_batch_size": n},
            f"the same, and a step has {n} rows in place of {rows}",
        )
        for n in fewer
    ]
    for method, cost in _ADAPTED:
        keys = {"method": method, "optim": "adamw", "fused_backward": False, "gradient_checkpointing": True}
        wanted.append((keys, cost))
        for n in fewer:
            less = {"per_device_train_batch_size": n, "gradient_accumulation_steps": steps * rows // n}
            wanted.append((keys | less, f"{cost}; {rows * steps // n} micro-batches a step"))
    seen: list[TrainConfig] = []
    for keys, cost in wanted:
        candidate = _overlaid(config, keys)
        if candidate not in seen and not problems_of(candidate, planning=True):
            seen.append(candidate)
            yield Rung(candidate, cost)


def choose_recipe(config: TrainConfig, need: Callable[[TrainConfig], tuple[Stage, str]], budget: int) -> Recipe:
    """The first rung that leaves at least 1 GiB, or 5 % of the budget, free; the smallest where none does.

    Args:
        config: its ``given`` keys are kept.
        need: (the stage that decides, batch and length in words) of a config; InvalidArgumentError where it cannot be
            planned, which passes the rung over.
        budget: bytes of the device.

    Raises ConfigError where no rung can work with the keys that were set, with the problems of the first.
    """
    spare_wanted = min(GIB, int(SPARE_SHARE * budget))
    kept = tuple(sorted((config.given or frozenset()) - _NOT_KEPT))
    passed: str = ""
    smallest: Recipe | None = None
    rungs = ladder(config)
    for rung in rungs:
        try:
            peak, where = need(rung.config)
        except InvalidArgumentError:
            continue
        found = Recipe(rung, peak, where, budget, passed, "a smaller batch, shorter rows, more devices", kept)
        if found.spare >= spare_wanted:
            return dataclasses.replace(found, next=_next(rungs, need, found.next))
        short = format_bytes(spare_wanted - found.spare)
        passed = f"{rung.name} would need {format_bytes(found.total)}, {short} more than leaves room"
        if smallest is None or found.total < smallest.total:
            smallest = found
    if smallest is None:
        first = _overlaid(config, _FULL[-1][0])
        problems = problems_of(first, planning=True) or ["no way to train with these keys can be planned"]
        raise ConfigError("\n".join(f"- {problem}" for problem in problems))
    return smallest


def _next(rungs: Iterator[Rung], need: Callable[[TrainConfig], tuple[Stage, str]], otherwise: str) -> str:
    for rung in rungs:
        try:
            return f"{rung.name}, {format_bytes(need(rung.config)[0].total)}"
        except InvalidArgumentError:
            continue
    return otherwise


def _halves(rows: int) -> list[int]:
    """[4, 2, 1] of 8."""
    found = []
    while rows > 1:
        rows //= 2
        found.append(rows)
    return found


def _overlaid(config: TrainConfig, keys: dict[str, Any]) -> TrainConfig:
    """``config`` with what a rung says where the user said nothing."""
    new = {key: value for key, value in keys.items() if not config.sets(key)}
    if config.sets("method") and config.method != "auto":
        new.pop("method", None)
    elif "method" in keys:
        new["method"] = keys["method"]
    recomputing = new.pop("gradient_checkpointing_kwargs", None)
    extra = dict(config.extra)
    candidate = dataclasses.replace(config, **new)
    if recomputing and candidate.gradient_checkpointing:
        extra["gradient_checkpointing_kwargs"] = recomputing
    if candidate.optim not in ("ternary_adamw", "adamw") or candidate.dtype != "bfloat16":
        candidate = candidate if config.sets("master_bits") else dataclasses.replace(candidate, master_bits=None)
    if candidate.method not in LORA_METHODS and not candidate.ours and not config.sets("fused_backward"):
        candidate = dataclasses.replace(candidate, fused_backward=None)
    return dataclasses.replace(candidate, extra=extra)
