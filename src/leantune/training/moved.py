"""How many weights a step moves: in narrow formats an update below half a unit in the last place is lost to rounding to
nearest, and training stalls without a word. This is the figure that shows it."""

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from leantune.optim.row_shard import local

SAMPLED = 1 << 16
"""Weights of a parameter group that are looked at, spread evenly over its parameters."""


class MovedShare(TrainerCallback):
    """``percent``: of the sampled weights, how many the last logged step changed, for each parameter group; None before
    one. Costs nothing in steps that are not logged.

    Weights are noted before a step begins and compared when it is logged, so that nothing of this shows where the
    memory of the step itself is measured."""

    def __init__(self) -> None:
        self.percent: list[float] | None = None
        self._before: list[list[Tensor]] | None = None
        self._groups: list[list[Tensor]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **rest: Any) -> None:
        """Note the sampled weights where this step will be logged."""
        self._before = None
        due = (state.global_step + 1) % max(1, int(state.logging_steps)) == 0 or state.global_step == 0
        if optimizer is None or not due:
            return
        self._groups = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
        self._before = [[_sample(p, len(group)) for p in group] for group in self._groups]

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **rest: Any) -> None:
        """Compare, where it is a step that is logged."""
        if self._before is None or "loss" not in (logs or {}):
            return
        self.percent = []
        for group, noted in zip(self._groups, self._before, strict=True):
            moved = sum(int((_sample(p, len(group)) != before).sum()) for p, before in zip(group, noted, strict=True))
            looked_at = sum(before.numel() for before in noted)
            self.percent.append(round(100 * moved / max(1, looked_at), 2))
        self._before = None


@torch.no_grad()
def _sample(param: Tensor, parameters: int) -> Tensor:
    """A copy of evenly spaced weights of a parameter, one of ``parameters`` in its group."""
    flat = local(param).detach().reshape(-1)
    stride = max(1, flat.numel() * parameters // SAMPLED)
    return flat[:: stride | 1].clone()
