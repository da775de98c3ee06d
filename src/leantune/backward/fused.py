"""FusedBackward: each gradient is applied and freed inside backward, so that one gradient lives at a time (LOMO).

One-pass modes (clip "per_tensor", "none"): the hook of a weight updates it as soon as its gradient is complete.
Two-pass mode (clip "global"): the first backward only measures the norm and keeps the graph; the second, over the same
forward, updates with the exact factor. Both go through ``LeanOptimizer.update``, the path that an ordinary ``step()``
walks.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from leantune.backward.clip import CLIP_MODES, clip_factor, combined_norm
from leantune.errors import BackwardError, InvalidArgumentError, InvalidTypeError, NonFiniteError
from leantune.optim.base import LeanOptimizer


@dataclass
class _Target:
    """One hooked parameter: who updates it and where it stands."""

    name: str
    optimizer: LeanOptimizer
    group: int
    place: int
    handle: Any = None


class FusedBackward:
    """Applies and frees gradients inside backward.

    Args:
        optimizer: one leantune optimizer, or several over disjoint parameters.
        model: gives parameters their names in errors; refuses reentrant checkpointing and parameters nobody updates.
        clip: "per_tensor": each tensor's gradient is brought to a norm of at most ``max_grad_norm`` (default 1.0), one
            backward; "global": exact clipping of the norm over all tensors, two backwards over one forward; "none".
        max_grad_norm: the bound; with clip="none" it is refused, since it would be ignored.

    ``loss.backward(); optimizer.step()`` in the one-pass modes; ``fused.backward(loss); optimizer.step()`` in any.
    ``step()`` closes the step (schedulers count it). ``grad_norm`` is then the true global norm before clipping.

    Raises:
        InvalidArgumentError, InvalidTypeError: at construction, nothing hooked.
        BackwardError: a second backward before step() (gradient accumulation), reentrant checkpointing, plain backward
        with "global". NonFiniteError: in two-pass mode before anything moves; in one-pass mode naming what has moved.

    >>> layer = nn.Linear(32, 32)
    >>> from leantune.optim.lomo import Lomo
    >>> optimizer = Lomo(layer.named_parameters(), lr=0.1)
    >>> fused = FusedBackward(optimizer, model=layer)
    >>> layer(torch.ones(4, 32)).sum().backward()
    >>> optimizer.step(); layer.weight.grad is None, fused.grad_norm > 0
    (True, True)

    Source: Lv et al. 2023, arXiv 2306.09782; the second backward replaces their second forward.
    """

    def __init__(
        self,
        optimizer: LeanOptimizer | list[LeanOptimizer] | tuple[LeanOptimizer, ...],
        model: nn.Module | None = None,
        clip: str = "per_tensor",
        max_grad_norm: float | None = None,
    ) -> None:
        self.optimizers: list[LeanOptimizer] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        self.clip = clip
        self.max_grad_norm = _checked_bound(clip, max_grad_norm)
        self.grad_norm: float | None = None
        self._targets = _collect(self.optimizers, model)
        self._squares: dict[Tensor, Tensor] = {}
        self._moved: list[str] = []
        self._closed: set[int] = set()
        self._phase = "idle"
        self._graph_task: int | None = None
        self._whole = False  # whether the backward that began last ran to its end
        self._factor = 1.0
        self._failed = ""
        for param, target in self._targets.items():
            target.handle = param.register_post_accumulate_grad_hook(functools.partial(_fire, self))
        for one in self.optimizers:
            one._fused = self

    # -- the user's calls -------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor) -> None:
        """Run backward from a scalar ``loss`` and update every parameter on the way; close with ``optimizer.step()``.

        The loss is checked first: NonFiniteError leaves everything as it was.
        """
        self._refuse_second_backward()
        if not bool(torch.isfinite(loss.detach()).all()):
            raise NonFiniteError(
                f"the loss is {loss.detach().float().mean().item()}; backward was not run and nothing has been updated."
            )
        try:
            if self.clip != "global":
                loss.backward()
                return
            self._phase = "measure"
            loss.backward(retain_graph=True)
            norm = combined_norm(self._squares[param] for param in self._targets if param in self._squares)
            self._factor = clip_factor(norm, self.max_grad_norm)
            self._phase, self._graph_task = "apply", None
            loss.backward()
        except BaseException as error:
            # Out of memory, an interrupt: not from a gradient. What has moved must not pass for a whole step.
            self._failed = self._failed or f"{type(error).__name__} outside of the hooks"
            self._forgive_if_nothing_moved()
            raise
        finally:
            self._phase = "idle"

    def remove(self) -> None:
        """Take every hook off; the optimizers' ``step()`` is the ordinary one again."""
        for target in self._targets.values():
            target.handle.remove()
        for one in self.optimizers:
            one._fused = None
        self._targets = {}

    def close_step(self, optimizer: LeanOptimizer) -> None:
        """What ``optimizer.step()`` does here: check that backward updated, publish the norm, make ready for the next
        step."""
        if self._failed:
            failed, self._failed = self._failed, ""
            self._reset()
            raise BackwardError(f"the last backward stopped in the middle: {failed}")
        if self._squares and not self._whole:
            self._reset()
            raise BackwardError(
                "the last backward was interrupted before its end: part of the parameters has been updated, the rest "
                "has not. Go back to the last checkpoint."
            )
        for param, target in self._targets.items():
            if target.optimizer is optimizer:
                self._check_updated(param, target)
        self._refuse_newcomers(optimizer)
        if id(optimizer) in self._closed:
            raise BackwardError("step() was called twice for one backward. Run a backward before each step().")
        self._closed.add(id(optimizer))
        if not self._squares and not self._closed - {id(optimizer)}:
            self._closed.clear()
            raise BackwardError(
                "step() found no gradient: no backward has run since the last step, or it ran without reaching any "
                "parameter of this optimizer. Were the hooks lost (copy.deepcopy, load_state_dict(assign=True))? "
                "Build FusedBackward on the model that is trained."
            )
        if len(self._closed) == len(self.optimizers):
            self.grad_norm = combined_norm(self._squares[param] for param in self._targets if param in self._squares)
            self._reset()

    # -- inside backward --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _on_gradient(self, param: Tensor) -> None:
        target, grad = self._targets[param], param.grad
        if grad is None:
            return
        try:
            self._check_phase(target.name)
            square = self._checked(param, grad, target)
            if self._phase == "measure":
                self._squares[param] = square
                return
            self._refuse_repeat(param, target.name)
            factor = self._factor
            if self._phase != "apply":
                self._squares[param] = square
                factor = clip_factor(square.sqrt().item(), self.max_grad_norm) if self.clip == "per_tensor" else 1.0
            optimizer = target.optimizer
            optimizer.update(param, grad, optimizer.param_groups[target.group], optimizer.state[param], factor)
            self._moved.append(target.name)
        except Exception as error:
            self._failed = f"{type(error).__name__} at {target.name}"
            self._forgive_if_nothing_moved()
            raise
        finally:
            param.grad = None

    def _checked(self, param: Tensor, grad: Tensor, target: _Target) -> Tensor:
        try:
            return target.optimizer.check_gradient(param, grad, target.group, target.place)
        except NonFiniteError:
            moved = (
                f"{len(self._moved)} parameter(s) had been updated: {', '.join(self._moved)}"
                if self._moved
                else "Nothing had been updated"
            )
            raise NonFiniteError(
                f"the gradient of {target.name} holds NaN or Inf; backward stops here. {moved}. "
                + (
                    "Go back to the last checkpoint, or use clip='global', which looks at every gradient first."
                    if self._moved
                    else ""
                )
            ) from None

    def _check_phase(self, name: str) -> None:
        if self.clip == "global" and self._phase == "idle":
            raise BackwardError(
                f"clip='global' needs two backwards over one forward, and loss.backward() is one (stopped at {name}, "
                "nothing updated). Call fused.backward(loss), or choose clip='per_tensor'."
            )
        task = torch._C._current_graph_task_id()
        if self._graph_task is None:
            self._graph_task, self._whole = task, False
            Variable._execution_engine.queue_callback(self._note_end)
        elif task != self._graph_task:
            raise BackwardError(
                f"{name} got a gradient in a second backward before step(). Gradient accumulation needs gradients that "
                "live, and fused backward frees them: use a larger micro-batch, or an ordinary backward. If the model "
                "uses reentrant checkpointing, set use_reentrant=False. Updated so far: "
                f"{', '.join(self._moved) or 'nothing'}."
            )

    def _note_end(self) -> None:
        self._whole = True

    def _refuse_repeat(self, param: Tensor, name: str) -> None:
        if self._phase == "idle" and param in self._squares:
            raise BackwardError(
                f"{name} got a second gradient in one backward; reentrant checkpointing does that: set "
                f"use_reentrant=False."
            )

    def _refuse_second_backward(self) -> None:
        if self._moved:
            raise BackwardError(
                "backward was called again before step(). Under fused backward every backward is a whole step "
                "(gradient accumulation would need the gradients to live): call optimizer.step() first."
            )

    # -- closing ----------------------------------------------------------------------------------------------------

    def _check_updated(self, param: Tensor, target: _Target) -> None:
        if param.grad is not None:
            raise BackwardError(
                f"{target.name} has a gradient that no hook took: its hook was lost, or .grad was set by hand. "
                "remove() this FusedBackward and build a new one."
            )
        group = target.optimizer.param_groups[target.group]["params"]
        if group[target.place] is not param:
            raise BackwardError(
                f"{target.name} was replaced in its optimizer after FusedBackward was built; build a new one."
            )

    def _refuse_newcomers(self, optimizer: LeanOptimizer) -> None:
        for index, group in enumerate(optimizer.param_groups):
            for place, param in enumerate(group["params"]):
                if param.requires_grad and param not in self._targets:
                    raise BackwardError(
                        f"{optimizer.name_of(index, place)} was unfrozen or added after FusedBackward was built, so it "
                        "has no hook and is not trained. remove() this FusedBackward and build a new one."
                    )

    def _forgive_if_nothing_moved(self) -> None:
        """A backward that stopped before it moved anything leaves no trace: the batch can be skipped."""
        if not self._moved:
            self._failed = ""
            self._reset()

    def _reset(self) -> None:
        self._squares.clear()
        self._moved.clear()
        self._closed.clear()
        self._graph_task, self._factor, self._phase = None, 1.0, "idle"


def _fire(fused: FusedBackward, param: Tensor) -> None:
    fused._on_gradient(param)


def _checked_bound(clip: str, max_grad_norm: float | None) -> float:
    if clip not in CLIP_MODES:
        raise InvalidArgumentError(f"clip is {clip!r}; write one of {', '.join(map(repr, CLIP_MODES))}.")
    if clip == "none" and max_grad_norm is not None:
        raise InvalidArgumentError(
            "max_grad_norm is set but clip='none' would ignore it. Use clip='global' (exact) or 'per_tensor'."
        )
    if max_grad_norm is not None and not 0 < float(max_grad_norm) < float("inf"):
        raise InvalidArgumentError(f"max_grad_norm is {max_grad_norm}; it must be a finite number above 0.")
    return 1.0 if max_grad_norm is None else float(max_grad_norm)


def _collect(optimizers: Iterable[Any], model: nn.Module | None) -> dict[Tensor, _Target]:
    """Every trainable parameter of the optimizers with its target; everything that cannot work is refused here."""
    names = {} if model is None else {param: name for name, param in model.named_parameters()}
    targets: dict[Tensor, _Target] = {}
    for optimizer in optimizers:
        if not isinstance(optimizer, LeanOptimizer):
            raise InvalidTypeError(
                f"FusedBackward drives leantune's optimizers, not "
                f"{type(optimizer).__module__}.{type(optimizer).__name__}: its "
                "step() needs all gradients at once. Use lt.AdamW, lt.TernaryAdamW, "
                "lt.TacoOneSparse, lt.Lomo or lt.AdaLomo."
            )
        if optimizer._fused is not None:
            raise InvalidArgumentError("this optimizer already has a FusedBackward; call remove() on it first.")
        for index, group in enumerate(optimizer.param_groups):
            for place, param in enumerate(group["params"]):
                name = names.get(param) or optimizer.name_of(index, place)
                if param in targets:
                    raise InvalidArgumentError(f"{name} is in two of the optimizers; it would be updated twice a step.")
                if param.grad is not None:
                    raise InvalidArgumentError(
                        f"{name} already has a gradient, which would be taken for one of the first backward. Call "
                        "optimizer.zero_grad() before building FusedBackward."
                    )
                if param.requires_grad:
                    targets[param] = _Target(name, optimizer, index, place)
    if not targets:
        raise InvalidArgumentError("none of the optimizer's parameters requires a gradient; there is nothing to train.")
    forgotten = [name for param, name in names.items() if param.requires_grad and param not in targets]
    if forgotten:
        raise InvalidArgumentError(
            f"the model trains {len(forgotten)} parameter(s) that no optimizer updates "
            f"({', '.join(forgotten[:3])}...); their gradients would pile up. Give them to an optimizer, or freeze "
            "them."
        )
    for name, module in model.named_modules() if model is not None else ():
        keywords = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
        if getattr(module, "gradient_checkpointing", False) and keywords.get("use_reentrant", False):
            raise InvalidArgumentError(
                f"{name or 'the model'} uses reentrant checkpointing, whose nested backwards would update weights in "
                f"pieces. "
                'Enable it with gradient_checkpointing_kwargs={"use_reentrant": False}.'
            )
    return targets
