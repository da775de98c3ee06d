"""The exact savings of a run: which of the chosen ones a model allows, and what the header says of them."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from leantune.activations.exact.apply import ExactSavings, apply_exact_savings
from leantune.errors import ConfigError
from leantune.training.config import TrainConfig
from leantune.training.trainer import loss_obstacle

_NOT_FOUND = {
    "swiglu": "no activation of its own class between two projections",
    "dropout": "no nn.Dropout above 0",
    "shared_adapter_input": "no adapters",
}
"""Why a saving of modules applies to none."""


@dataclass(frozen=True)
class RunSavings:
    """What is in force in a model: the loss without logits or not, and the handle of what was done to its modules."""

    chosen: tuple[str, ...]
    """Of `leantune.training.config.EXACT_SAVINGS`."""
    loss: bool
    """The loss is computed without logits."""
    obstacle: str | None
    """Why it is not, where it was chosen."""
    modules: ExactSavings | None
    recomputed: bool = False
    """Modules were left as they are because every block is recomputed."""

    def lines(self) -> list[str]:
        """What a header says: how the loss is computed, modules found for each saving, and what is left, with the
        reason."""
        lines = [f"full logits: {self.obstacle}" if self.obstacle else "full logits"]
        if self.loss:
            lines = ["loss without logits, tiled over the vocabulary"]
        if self.recomputed:
            lines.append(
                "every block is recomputed and keeps nothing: the other savings are off (named in exact_savings, they "
                "lower the peak of a block's recomputation)"
            )
        if self.modules is None:
            return lines
        report = self.modules.report()
        found = report.by_saving()
        for saving in self.chosen:
            if saving in found:
                lines.append(f"{saving}: {found[saving]} modules")
            elif saving != "loss":
                lines.append(f"{saving}: nothing found ({_NOT_FOUND[saving]})")
        reasons = Counter(why for _, why in report.left)
        for why, count in reasons.items():
            name = next(name for name, reason in report.left if reason == why)
            more = f" and {count - 1} more" if count > 1 else ""
            lines.append(f"left alone: {name or 'the model itself'}{more}: {why}")
        return lines


def apply_run_savings(config: TrainConfig, model: Any) -> RunSavings:
    """Put the chosen savings into a model that has its adapters already.

    Raises ConfigError, the model unchanged, where the loss without logits was asked for by name and is not this
    model's loss; with ``exact_savings: true`` it is left out then.
    """
    chosen = config.chosen_savings
    obstacle = loss_obstacle(model) if "loss" in chosen else None
    if obstacle is not None and config.exact_savings is not True:
        raise ConfigError(f"- exact_savings: {obstacle}; leave loss out of it")
    of_modules = {name: name in chosen for name in _NOT_FOUND}
    handle = apply_exact_savings(model, **of_modules) if any(of_modules.values()) else None
    recomputed = config.exact_savings is True and config.checkpoint_every == 1
    return RunSavings(chosen, "loss" in chosen and obstacle is None, obstacle, handle, recomputed)
