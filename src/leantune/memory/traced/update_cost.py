"""What an optimizer costs: the bytes of its states, and the temporaries of one parameter's update.

States come from ``optimizer.report()`` where there is one (exact), from the allocated states where all exist, and
otherwise
from a trial: the same kind of optimizer stepping stand-in parameters of a few sizes, extrapolated in a straight line
where the line fits. Temporaries always come from such a trial, so that they are those of the update that will run.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leantune.memory.closed_form.optimizer_cost import STEP_COUNT_BYTES
from leantune.memory.measured.tracker import MemoryTracker, tensors_in

TRIAL_ELEMENTS = 1 << 19
"""Elements of the smaller of two stand-ins for a large parameter: eight of the tiles in which our rules walk."""


@dataclass(frozen=True)
class UpdateCost:
    """Bytes of optimizer states and of update temporaries, each for the parameters of some optimizers."""

    state_bytes: int
    temporaries: dict[int, int]
    """id of parameter -> bytes allocated and freed while it is updated."""
    whole_step: int
    """Temporaries of one ordinary ``step()`` over all parameters."""
    notes: list[str] = field(default_factory=list)
    """What could not be known, in words."""


def update_cost(optimizers: Sequence[Optimizer]) -> UpdateCost:
    """What these optimizers' states and updates cost. Changes neither them nor any random state.

    Costs a fraction of a second and a few MiB for each distinct parameter shape.
    """
    notes: list[str] = []
    states = 0
    temporaries: dict[int, int] = {}
    whole = 0
    for optimizer in optimizers:
        trial = _Trial(optimizer)
        states += _state_bytes(optimizer, trial, notes)
        for group in optimizer.param_groups:
            costs = {id(p): trial.temporaries(p, group) for p in group["params"] if p.requires_grad}
            temporaries.update(costs)
            together = sum if _all_at_once(group) else max
            whole = max(whole, together(costs.values()) if costs else 0)
        notes.extend(trial.notes)
    return UpdateCost(states, temporaries, whole, list(dict.fromkeys(notes)))


def _state_bytes(optimizer: Optimizer, trial: "_Trial", notes: list[str]) -> int:
    report = getattr(optimizer, "report", None)
    if callable(report):
        on_host = sum(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])
        return int(report().state_bytes) + STEP_COUNT_BYTES * on_host
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            if optimizer.state.get(parameter):
                total += _bytes_in(optimizer.state[parameter])
                continue
            predicted = trial.state_bytes(parameter, group)
            if predicted is None:
                notes.append(
                    f"the states of {type(optimizer).__name__} do not grow in a straight line with the parameter, or "
                    "it could not be tried: those not yet allocated are left out of the plan"
                )
            else:
                total += predicted
    return total


class _Trial:
    """Steps stand-in parameters with a fresh optimizer of the same class and options, and measures."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.kind = type(optimizer)
        self.accepted = set(inspect.signature(self.kind.__init__).parameters) - {"self", "params"}
        self.notes: list[str] = []
        self._temporaries: dict[Any, int] = {}
        self._states: dict[Any, tuple[int, int] | None] = {}

    def temporaries(self, parameter: Tensor, group: dict[str, Any]) -> int:
        """Bytes of temporaries of one update of ``parameter``, extrapolated over rows where it is large."""
        key = (tuple(parameter.shape), parameter.dtype, id(group))
        if key not in self._temporaries:
            update = self._measure_temporaries(parameter, group)
            self._temporaries[key] = max(update, self._check_temporaries(parameter))
        return self._temporaries[key]

    def _check_temporaries(self, parameter: Tensor) -> int:
        """Temporaries of checking a gradient before the update, where our optimizers do: level from some size on."""
        check = getattr(self.optimizer, "check_gradient", None)
        if not callable(check) or not parameter.ndim:
            return 0
        row = max(1, parameter.numel() // max(1, parameter.shape[0]))
        rows = min(parameter.shape[0], max(1, 4 * TRIAL_ELEMENTS // row))
        gradient = torch.zeros((rows, *parameter.shape[1:]), dtype=parameter.dtype, device=_trial_device(parameter))
        with MemoryTracker() as tracker:
            check(parameter, gradient, 0, 0)
        return tracker.peak_temporary_bytes

    def _measure_temporaries(self, parameter: Tensor, group: dict[str, Any]) -> int:
        shape = tuple(parameter.shape)
        if parameter.numel() <= 2 * TRIAL_ELEMENTS or not shape:
            return self._step(shape, parameter, group)[0]
        row = parameter.numel() // shape[0]
        small = max(1, TRIAL_ELEMENTS // row)
        if parameter.ndim != 3:  # the first dimension of three may count matrices
            small = max(small, getattr(self.optimizer, "least_trial_rows", 1))
        large = 2 * small
        if large >= shape[0]:
            return self._step(shape, parameter, group)[0]
        low = self._step((small, *shape[1:]), parameter, group)[0]
        high = self._step((large, *shape[1:]), parameter, group)[0]
        slope = max(0.0, (high - low) / (large - small))
        return int(high + slope * (shape[0] - large))

    def state_bytes(self, parameter: Tensor, group: dict[str, Any]) -> int | None:
        """Bytes of state of ``parameter``: a constant and bytes per element; None where sizes show no such line."""
        key = (parameter.dtype, parameter.ndim, id(group))
        if key not in self._states:
            lead = (4,) * (parameter.ndim - 1) if parameter.ndim else ()
            sizes = [64, 128, 320] if parameter.ndim else [1, 1, 1]
            shapes = [(*lead, size) if parameter.ndim else () for size in sizes]
            counts = [torch.Size(shape).numel() for shape in shapes]
            found = [self._step(shape, parameter, group)[1] for shape in shapes]
            if min(found) < 0:
                self._states[key] = None
            elif parameter.ndim == 0:
                self._states[key] = (found[0], 0)
            else:
                slope = (found[1] - found[0]) // (counts[1] - counts[0])
                constant = found[0] - slope * counts[0]
                fits = all(constant + slope * count == size for count, size in zip(counts, found))
                self._states[key] = (constant, slope) if fits else None
        line = self._states[key]
        return None if line is None else line[0] + line[1] * parameter.numel()

    def _step(self, shape: tuple[int, ...], like: Tensor, group: dict[str, Any]) -> tuple[int, int]:
        """(temporaries, bytes of state) of a stand-in's second step; (0, -1) where the optimizer cannot be tried."""
        options = {name: value for name, value in group.items() if name in self.accepted and name != "params"}
        stand_in = nn.Parameter(torch.full(shape, 0.02, dtype=like.dtype, device=_trial_device(like)))
        gradient = torch.linspace(-1e-3, 1e-3, max(1, stand_in.numel()), dtype=torch.float32, device=stand_in.device)
        try:
            optimizer = self.kind([stand_in], **options)
            tracker = MemoryTracker(None, [optimizer])
            for step in range(2):
                stand_in.grad = gradient[: stand_in.numel()].view(shape).to(like.dtype)
                if step == 0:
                    optimizer.step()
                else:
                    update = getattr(optimizer, "update", None)
                    with tracker:
                        if callable(update):  # without the check that step() makes first: that does not grow alike
                            update(stand_in, stand_in.grad, optimizer.param_groups[0], optimizer.state[stand_in])
                        else:
                            optimizer.step()
        except Exception as error:
            self.notes.append(
                f"{self.kind.__name__} could not be tried on a stand-in parameter ({type(error).__name__}: {error}): "
                "the temporaries of its update are left out of the plan"
            )
            return 0, -1
        return tracker.peak_temporary_bytes, _bytes_in(optimizer.state[stand_in])


def _trial_device(parameter: Tensor) -> torch.device:
    """Where stand-ins are stepped: on the parameter's device, on a CPU for one of a model that does not exist."""
    return torch.device("cpu") if parameter.is_meta else parameter.device


def _all_at_once(group: dict[str, Any]) -> bool:
    """Whether torch steps this group with foreach kernels, whose temporaries span all of its parameters."""
    if "foreach" not in group or group.get("fused"):
        return False
    if group["foreach"] is None:
        return any(p.device.type == "cuda" for p in group["params"])
    return bool(group["foreach"])


def _bytes_in(state: Any) -> int:
    """Bytes of the distinct tensors in a state."""
    tensors = {id(tensor): tensor for tensor in tensors_in(state)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
