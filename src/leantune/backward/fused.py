"""FusedBackward: each gradient is applied and freed inside backward, so that one gradient lives at a time (LOMO).

One-pass modes (clip "per_tensor", "none"): the hook of a weight updates it as soon as its gradient is complete.
Two-pass mode (clip "global"): the first backward only measures the norm and keeps the graph; the second, over the same
forward, updates with the exact factor. Both go through ``LeanOptimizer.update``, the path that an ordinary ``step()``
walks.
With float16's loss scale both modes measure first, since an overflow is known only after a whole backward. With
gradient accumulation, gradients live, as sums, until the last micro-batch; then they are clipped, applied and freed.

The largest gradient, the output head's, need not live either: where ``fused.backward`` finds that the loss without
logits (`leantune.linear_cross_entropy`) alone gives a head its gradient, it takes it a tile of vocabulary rows at a
time inside the loss's own backward: one walk over the tiles for the norm, further ones for the update.
"""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from leantune.backward.accumulation import Accumulator
from leantune.backward.clip import clip_factor, combined_norm
from leantune.backward.graph import reached_by
from leantune.backward.heads import Heads
from leantune.backward.kept import KeptGradients
from leantune.backward.reduction import Reducer, bucket_bytes, replicas
from leantune.backward.scaling import LossScale
from leantune.backward.targets import Target, checked_bound, collect
from leantune.codec.counter_hash import stream_key
from leantune.errors import BackwardError, InvalidArgumentError, NonFiniteError, StateMismatchError
from leantune.optim.base import LeanOptimizer
from leantune.optim.gradient import Gradient, TiledGradient, Walk, whole_squared_norm
from leantune.optim.row_shard import is_sharded


class FusedBackward:
    """Applies and frees gradients inside backward.

    Args:
        optimizer: one leantune optimizer, or several over disjoint parameters.
        model: gives parameters their names in errors; refuses reentrant checkpointing and parameters nobody updates.
        clip: "per_tensor": each tensor's gradient is brought to a norm of at most ``max_grad_norm`` (default 1.0), one
            backward; "global": exact clipping of the norm over all tensors, two backwards over one forward; "none".
        max_grad_norm: the bound; with clip="none" it is refused, since it would be ignored.
        accumulate: what holds the sum of gradients over micro-batches, "float32" (exact, 4 bytes a parameter) or
            "bfloat16" (stochastically rounded, 2 bytes); None refuses a second backward before ``step()``.
        loss_scale: a `LossScale` for float16 gradients. Every backward then is two passes over one forward.
        process_group: of replicas whose gradients are averaged here, in the gradients' own dtype, before they are
            clipped and applied; then only ``fused.backward(loss)`` will do. "auto": all processes, where
            torch.distributed runs more than one and parameters are whole on each; of a DistributedDataParallel
            ``model`` its own, whose reduction is turned off. None: no process knows of another. Sharded parameters
            (FSDP2) are averaged by their own hooks.
        head: "tiles": the gradient of an output head under `leantune.linear_cross_entropy` is never whole where that is
            possible (see `report`), at the cost of making its logits again for the update; "whole": one buffer of the
            head's dtype, as for every other weight.
        keep_bytes: with two passes, gradients that the first may keep, those of the layers nearest to the input; the
            second then ends before it reaches them, and a step takes that much less time. Held beside all saved
            activations. Afterwards ``loss`` is detached, so that what was not walked again is freed.

    ``loss.backward(); optimizer.step()`` in the one-pass modes; ``fused.backward(loss); optimizer.step()`` in any.
    With micro-batches: ``fused.backward(share * loss, last=False)`` for all but the last one, where ``share`` is what
    this micro-batch is of the batch (its tokens over all), as in an ordinary loop.
    ``step()`` closes the step (schedulers count it). ``grad_norm`` is then the true global norm before clipping.
    ``dropped``: the last step overflowed under a loss scale and moved nothing; do not advance the schedule then.

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
        accumulate: str | None = None,
        loss_scale: LossScale | None = None,
        process_group: Any = "auto",
        head: str = "tiles",
        keep_bytes: int = 0,
    ) -> None:
        self.optimizers: list[LeanOptimizer] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        self.clip = clip
        self.max_grad_norm = checked_bound(clip, max_grad_norm)
        self.grad_norm: float | None = None
        self.loss_scale = loss_scale
        self.dropped = False
        self._accumulates = accumulate is not None
        self._accumulator = Accumulator("float32" if accumulate is None else accumulate)
        self._gathered = 0  # micro-batches
        self._scale = 1.0  # of the loss in this step
        self._targets = collect(self.optimizers, model)
        whole = [param for param in self._targets if not is_sharded(param)]
        self._wrapped = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
        group = replicas(model, process_group) if whole else None
        self._reducer = None if group is None else Reducer(whole, group)
        self._heads = Heads(head, averaged=self._reducer is not None)
        self._kept = KeptGradients(self._checked_keep(keep_bytes))
        self._squares: dict[Tensor, float] = {}
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

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Run backward from a scalar ``loss`` and update every parameter on the way; close with ``optimizer.step()``.

        ``last``: False where further micro-batches of this step follow; gradients are then added up and nothing moves.
        The loss is checked first: NonFiniteError leaves everything as it was.
        """
        self._refuse_second_backward()
        if not last and not self._accumulates:
            raise BackwardError(
                "backward(last=False) accumulates gradients, which then must live, and fused backward frees each as "
                "soon as it is applied. Take a larger micro-batch (the loss without logits and checkpointing make "
                "room; with beta2 at the same half-life in tokens a smaller batch trains as well), or build "
                "FusedBackward with accumulate='float32' (4 bytes a parameter) or 'bfloat16' (2, rounded)."
            )
        self.dropped = False
        finite, gathers = bool(torch.isfinite(loss.detach()).all()), bool(self._gathered) or not last
        everywhere = finite
        if self._reducer is not None:
            # Sums are agreed on when all are there.
            everywhere = self._reducer.begin(set() if gathers else reached_by(loss, self._targets), finite)
        if finite and not everywhere:
            raise NonFiniteError(
                "the loss of another process is not finite; backward was not run and nothing has been updated."
            )
        if not finite:
            raise NonFiniteError(
                f"the loss is {loss.detach().float().mean().item()}; backward was not run and nothing has been updated."
            )
        try:
            with self._heads.in_tiles(loss, self._targets, gathers, self._on_tiles):
                self._run(loss, gathers)
            if gathers and last:
                self._apply_sums()
        except BaseException as error:
            # Out of memory, an interrupt: not from a gradient. What has moved must not pass for a whole step.
            self._failed = self._failed or f"{type(error).__name__} outside of the hooks"
            self._forgive_if_nothing_moved()
            if "donated buffers" in str(error):
                raise BackwardError(
                    "a compiled part of the model gives its saved tensors away in its first backward, and this mode "
                    "runs two over one forward; nothing has been updated. Set torch._functorch.config.donated_buffer "
                    "= False before the model first runs (after that, torch._dynamo.reset() has it compiled again), or "
                    "take clip='per_tensor' without a loss scale."
                ) from error
            raise
        finally:
            self._phase = "idle"

    def _checked_keep(self, keep_bytes: int) -> int:
        if keep_bytes < 0:
            raise InvalidArgumentError(f"keep_bytes is {keep_bytes}; it is a number of bytes, 0 to keep nothing.")
        if keep_bytes and not self.two_passes:
            raise InvalidArgumentError(
                f"keep_bytes={keep_bytes} would do nothing: clip={self.clip!r} runs one backward. Leave it out, or use "
                "clip='global'."
            )
        if keep_bytes and (self._reducer is not None or any(map(is_sharded, self._targets))):
            raise InvalidArgumentError(
                "keep_bytes works in one process: on replicas and shards every backward runs to its end, so that the "
                "processes' collectives meet. Leave it out there."
            )
        return keep_bytes

    @property
    def two_passes(self) -> bool:
        """Whether a step without micro-batches runs two backwards over one forward."""
        return self.clip == "global" or self.loss_scale is not None

    def reached(self, param: Tensor) -> bool:
        """Whether ``param`` got a gradient in the step that waits for ``step()``, on any process."""
        return param in self._squares

    def report(self) -> str:
        """How the gradient of each output head under `leantune.linear_cross_entropy` was taken by the last backward;
        and the bytes that a DistributedDataParallel around the model keeps for nothing."""
        lines = [self._heads.report()]
        if self._wrapped is not None:
            lines.append(
                f"DistributedDataParallel keeps {bucket_bytes(self._wrapped):,} bytes of buckets for gradients, which "
                "its reduction, turned off, does not use; lt.replicate(model) in its place has none"
            )
        return "\n".join(lines)

    def remove(self) -> None:
        """Take every hook off; the optimizers' ``step()`` is the ordinary one again, and so is
        DistributedDataParallel's reduction."""
        if self._wrapped is not None:
            self._wrapped.require_backward_grad_sync = True
        for target in self._targets.values():
            target.handle.remove()
        for one in self.optimizers:
            one._fused = None
        self._targets = {}
        self._drop_sums()

    def forget(self, optimizer: LeanOptimizer) -> None:
        """What ``optimizer.zero_grad()`` does here: drop what was accumulated for its parameters."""
        sums = self._accumulator.sums
        for param in [key for key in sums if self._targets[key].optimizer is optimizer]:
            del sums[param]
        self._gathered = self._gathered if sums else 0

    def state_dict(self) -> dict[str, Any]:
        """The loss scale's; empty without one. Everything else is in the optimizers' own."""
        return {} if self.loss_scale is None else self.loss_scale.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict()``. Raises StateMismatchError where it does not fit, with nothing changed."""
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state)
        elif state:
            raise StateMismatchError(
                "the saved state has a loss scale; build FusedBackward with loss_scale=LossScale()."
            )

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
        if self._gathered:
            raise BackwardError(
                f"step() was called after {self._gathered} micro-batch(es), each with last=False: nothing has been "
                "applied. Give the last one to fused.backward(loss), or call optimizer.zero_grad() to drop them."
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
            self.grad_norm = self._norm()
            self._reset()

    def _run(self, loss: Tensor, gathers: bool) -> None:
        """The backwards of one ``backward``, each in its phase."""
        self._scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        scaled = loss if self.loss_scale is None else loss * self._scale
        if gathers:
            self._phase, self._graph_task = "gather", None
            scaled.backward()
            self._gathered, self._graph_task = self._gathered + 1, None
        elif self.two_passes:
            self._phase = "measure"
            scaled.backward(retain_graph=True)
            self._finish_reduction()
            if self._decide():
                self._phase, self._graph_task = "apply", None
                if self._reducer is not None:
                    self._reducer.restart()
                self._second_pass(scaled)
                self._finish_reduction()
                self._apply_kept()
                if self._kept.budget and not loss._is_view():
                    loss.detach_()
        else:
            self._phase = "once"
            scaled.backward()
            self._finish_reduction()

    def _second_pass(self, loss: Tensor) -> None:
        """Backward for the update, as far down as gradients are missing."""
        if not self._kept.budget:
            loss.backward()
            return
        missing = [param for param in self._squares if param not in self._kept]
        if missing:
            loss.backward(inputs=missing)

    @torch.no_grad()
    def _apply_kept(self) -> None:
        """Apply and free what the first pass kept."""
        while (kept := self._kept.take()) is not None:
            param, grad = kept
            with self._blaming(self._targets[param].name):
                self._take(param, grad, self._targets[param])

    # -- inside backward --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _on_tiles(self, param: Tensor, walk: Walk) -> None:
        """The head's gradient is there to be walked over, inside the loss's backward."""
        target = self._targets[param]
        with self._blaming(target.name):
            self._check_phase(target.name)
            rows, cols = param.shape
            self._take(param, TiledGradient((rows, cols), torch.float32, param.device, walk), target)

    @torch.no_grad()
    def _on_gradient(self, param: Tensor) -> None:
        target, grad = self._targets[param], param.grad
        if grad is None:
            return
        try:
            with self._blaming(target.name):
                self._check_phase(target.name)
                if self._phase == "gather":
                    self._gather(param, grad, target)
                    return
                if self._reducer is None or is_sharded(param):
                    self._take(param, grad, target)
                    return
                param.grad = None
                for one, averaged in self._reducer.ready(param, grad):
                    self._take(one, averaged, self._targets[one])
        finally:
            param.grad = None

    @contextmanager
    def _blaming(self, name: str) -> Iterator[None]:
        """What fails in here failed at this parameter."""
        try:
            yield
        except Exception as error:
            self._failed = f"{type(error).__name__} at {name}"
            self._forgive_if_nothing_moved()
            raise

    def _take(self, param: Tensor, grad: Gradient, target: Target) -> None:
        """A gradient is complete, on every process: measure it, or apply it, or both."""
        if self._phase != "apply":
            square = self._square(param, grad, target)
            if self._phase != "measure":
                self._refuse_repeat(param, target.name)
            self._squares[param] = square
        if self._phase == "measure" and isinstance(grad, Tensor):
            self._kept.offer(param, grad)
        if self._phase != "measure":
            self._move(param, grad, target)

    @torch.no_grad()
    def _finish_reduction(self) -> None:
        """Parameters that other processes reached and this one did not."""
        if self._reducer is not None:
            for param, averaged in self._reducer.finish():
                self._take(param, averaged, self._targets[param])

    def _square(self, param: Tensor, grad: Gradient, target: Target) -> float:
        """The squared norm of a gradient, which must be finite, unless a loss scale will see to it."""
        if self.loss_scale is not None:
            return whole_squared_norm(param, grad)
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

    def _norm(self) -> float:
        """The global norm of the gradients seen, without the loss scale."""
        norm = combined_norm(self._squares[param] for param in self._targets if param in self._squares)
        return norm / self._scale

    def _decide(self) -> bool:
        """All gradients have been seen: the clip factor; False where they overflowed and the step is dropped."""
        norm = self._norm()
        if self.loss_scale is not None:
            if not math.isfinite(norm):
                self.dropped = True
                self.loss_scale.overflowed()
                return False
            self.loss_scale.whole_step()
        self._factor = clip_factor(norm, self.max_grad_norm) if self.clip == "global" else 1.0
        return True

    def _move(self, param: Tensor, grad: Gradient, target: Target) -> None:
        """The update of one parameter, whole."""
        factor = self._factor
        if self.clip == "per_tensor":
            factor = clip_factor(math.sqrt(self._squares[param]) / self._scale, self.max_grad_norm)
        optimizer = target.optimizer
        group = optimizer.param_groups[target.group]
        if isinstance(grad, TiledGradient):
            # Before: what makes the tiles may fail (out of memory) between two of them.
            self._moved.append(target.name)
            optimizer.update_in_tiles(param, grad, group, optimizer.state[param], factor / self._scale)
            return
        optimizer.update(param, grad, group, optimizer.state[param], factor / self._scale)
        self._moved.append(target.name)

    def _gather(self, param: Tensor, grad: Tensor, target: Target) -> None:
        """Add a micro-batch's gradient to its sum."""
        optimizer = target.optimizer
        seed = int(optimizer.param_groups[target.group]["seed"])
        step = int(optimizer.state[param]["step"]) if optimizer.state[param] else 0
        self._accumulator.add(param, grad, stream_key(seed + self._gathered + 1, step, optimizer._position(param)))

    @torch.no_grad()
    def _apply_sums(self) -> None:
        """After the last micro-batch: clip, apply and free the sums. A parameter may have been used in any of them."""
        sums, self._gathered = self._accumulator.sums, 0
        if self._reducer is not None:
            whole = {param: total for param, total in sums.items() if not is_sharded(param)}
            sums.update(self._reducer.sums(whole, self._accumulator.dtype))
        for param, target in self._targets.items():
            if param in sums:
                self._squares[param] = self._square(param, sums[param], target)
        if self._decide():
            for param, target in self._targets.items():
                if param in sums:
                    self._move(param, sums.pop(param), target)
        sums.clear()

    def _drop_sums(self) -> None:
        self._gathered = 0
        self._accumulator.sums.clear()

    def _check_phase(self, name: str) -> None:
        apart = self._reducer is not None
        if self._phase == "idle" and (self.two_passes or self._gathered or apart):
            needs = "clip='global'" if self.clip == "global" else "a process group" if apart else "a loss scale"
            raise BackwardError(
                f"{needs if not self._gathered else 'accumulation'} needs fused.backward(loss), and this was "
                f"loss.backward() (stopped at {name}, nothing updated). Call fused.backward(loss)"
                + (", or choose clip='per_tensor'." if self.clip == "global" else ".")
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
        if param in self._squares:
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

    def _check_updated(self, param: Tensor, target: Target) -> None:
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
        self._drop_sums()
        self._squares.clear()
        self._kept.clear()
        self._moved.clear()
        self._closed.clear()
        self._graph_task, self._factor, self._phase = None, 1.0, "idle"


def _fire(fused: FusedBackward, param: Tensor) -> None:
    fused._on_gradient(param)
