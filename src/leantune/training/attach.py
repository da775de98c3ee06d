"""attach: an existing transformers Trainer, or TRL trainer built on it, trains with fused backward.

The trainer's own training_step runs as it is, with its forward, its loss and its weighing of micro-batches. It ends in
``accelerator.backward(loss)``, and that call, while training lasts, is `FusedBackward`'s.
"""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback

from leantune.activations.exact.apply import ExactSavings, apply_exact_savings
from leantune.activations.exact.report import ExactReport
from leantune.backward.accumulation import Accumulator
from leantune.backward.clip import CLIP_MODES
from leantune.backward.fused import FusedBackward
from leantune.backward.scaling import LossScale
from leantune.backward.second_backward import check_second_backward
from leantune.backward.targets import checked_bound, collect
from leantune.errors import BackwardError, InvalidArgumentError, InvalidTypeError, StateMismatchError
from leantune.optim.base import LeanOptimizer
from leantune.optim.report import StateReport
from leantune.optim.ternary_adamw import TernaryAdamW
from leantune.training.checkpoint_names import check_loaded_by_name
from leantune.training.first_step import check_all_reached

_SAVINGS = ("swiglu", "dropout", "shared_adapter_input")
_SHARDED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA", "TP")


def attach(
    trainer: Trainer,
    optimizer: LeanOptimizer | None = None,
    *,
    clip: str | None = None,
    max_grad_norm: float | None = None,
    accumulate: str | None = None,
    loss_scale: LossScale | None = None,
    process_group: Any = "auto",
    exact_savings: bool | Sequence[str] = True,
) -> "Attached":
    """Make ``trainer.train()`` apply and free each gradient inside backward. Call it before ``train()``.

    Args:
        trainer: a transformers Trainer, a TRL SFTTrainer, or a subclass of theirs; its compute_loss and training_step
            stay in use. In one process or several (torchrun, accelerate launch; DistributedDataParallel).
        optimizer: one of leantune's. None: the one the trainer was given, or `TernaryAdamW` with the trainer's
            arguments (learning_rate, weight_decay, adam_beta1, adam_beta2, adam_epsilon, seed) and its groups.
        clip, max_grad_norm: as in `FusedBackward`; where both are left out, a ``max_grad_norm`` in the trainer's
            arguments that is not their default means exact clipping ("global") to it, 0 means "none", and the default
            means "per_tensor" at 1.0. A ``max_grad_norm`` alone means "global".
        accumulate: what holds sums of gradients with gradient_accumulation_steps above 1: "float32" (4 bytes a
            parameter) or "bfloat16" (2).
        loss_scale: a `LossScale`, for a model in float16. A step that overflows is dropped and the schedule waits. It
            is saved with the optimizer's state.
        process_group: as in `FusedBackward`.
        exact_savings: while training lasts, activations that can be made again are not kept, which changes no number
            (`leantune.apply_exact_savings`): True, all that the model allows; some of "swiglu", "dropout" and
            "shared_adapter_input"; or False. The loss stays the trainer's own, logits and all.

    Returns:
        a handle: ``remove()`` gives the trainer back as it was, ``report()`` says what each state costs, ``savings()``
        what exact savings found and saved.

    Raises:
        InvalidArgumentError, InvalidTypeError: with the trainer as it was.
        BackwardError: in the first step, where a trainable parameter got no gradient, or where the loss cannot be run
            backward twice and clip="global" or a loss scale need it.

        trainer = Trainer(model, args, train_dataset=rows)
        attached = lt.attach(trainer)
        trainer.train()
    """
    if not isinstance(trainer, Trainer):
        raise InvalidTypeError(
            f"attach takes a transformers Trainer (TRL's are), not {type(trainer).__name__}. In a loop of your own use "
            "lt.FusedBackward(optimizer, model=model)."
        )
    clip, bound = _clipping(trainer.args, clip, max_grad_norm)
    _refuse_what_cannot_work(trainer, accumulate)
    if optimizer is None and trainer.optimizer is None and trainer.optimizer_cls_and_kwargs is None:
        _refuse_ignored_optim(trainer.args)
    savings = _checked_savings(exact_savings)
    attached = Attached(trainer, clip, bound, accumulate, loss_scale, process_group, savings)
    attached._install(optimizer)
    return attached


class Attached(TrainerCallback):
    """What `attach` gives. ``fused`` is the `FusedBackward` of the training under way, None before and after.

    Nothing but the optimizer is in place outside of ``train()``; where ``train()`` ended in an error, the hooks stay
    until ``remove()`` or the next ``train()``.
    """

    def __init__(
        self,
        trainer: Trainer,
        clip: str,
        max_grad_norm: float | None,
        accumulate: str | None,
        loss_scale: LossScale | None,
        process_group: Any,
        exact_savings: tuple[str, ...] = (),
    ) -> None:
        self.fused: FusedBackward | None = None
        self.clip = clip
        self.max_grad_norm = max_grad_norm
        self.accumulate = accumulate
        self.loss_scale = loss_scale
        self.process_group = process_group
        self.exact_savings = exact_savings
        self.probes_loss = True
        """Whether the first step finds out that the loss can be run backward twice, where that is needed."""
        self._trainer: Any = trainer
        self._optimizer: LeanOptimizer | None = None
        self._savings: ExactSavings | None = None
        self._saved: ExactReport | None = None  # of the last training that ended
        self._before: tuple[Any, Any] = (trainer.optimizer, trainer.optimizer_cls_and_kwargs)
        self._undo: list[Callable[[], Any]] = []  # what attach did, in order
        self._undo_training: list[Callable[[], Any]] = []  # and what the training under way did
        self._first = True  # step of this training
        self._probed = False  # whether its loss may be run backward twice

    # -- the user's calls -------------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Give the trainer back as it was before `attach`; what was trained stays trained."""
        self._release()
        _run_backwards(self._undo)

    def report(self) -> StateReport:
        """Every parameter with the storage and the bytes of its state. Raises BackwardError before there is an
        optimizer (a trainer with model_init makes it in train())."""
        if self._optimizer is None:
            raise BackwardError("the optimizer is made in train(), from model_init; ask for the report after that.")
        return self._optimizer.report()

    def savings(self) -> ExactReport | None:
        """What exact savings found, module by module, with the bytes of the last step; None before the first
        training, where none were chosen, and where the model had savings of its own."""
        return self._saved if self._savings is None else self._savings.report()

    def __repr__(self) -> str:
        bound = "" if self.clip == "none" else f" at {self.max_grad_norm or 1.0}"
        sums = "" if self.accumulate is None else f", sums of micro-batches in {self.accumulate}"
        return f"Attached({type(self._optimizer).__name__}, clip={self.clip!r}{bound}{sums})"

    # -- the optimizer ----------------------------------------------------------------------------------------------

    def _install(self, optimizer: LeanOptimizer | None) -> None:
        """Settle on the optimizer, and be called by the trainer. An error leaves the trainer as it was."""
        trainer = self._trainer
        create = trainer.create_optimizer
        self._undo.append(self._restore_optimizer)
        try:
            if optimizer is not None:
                trainer.optimizer = optimizer
            elif trainer.optimizer is None and trainer.optimizer_cls_and_kwargs is None:
                # The trainer then builds it over its own groups, each time it makes a model anew.
                trainer.optimizer_cls_and_kwargs = (TernaryAdamW, _adam_settings(trainer.args))
            if trainer.model_init is None:
                made = _unwrapped(create())
                collect([made], trainer.model)
                _refuse_foreign_schedule(trainer, made)
                self._adopt(made)
        except BaseException:
            self.remove()
            raise

        def create_optimizer(*arguments: Any, **more: Any) -> Any:
            made = create(*arguments, **more)
            self._adopt(_unwrapped(made))
            return made

        load = trainer._load_from_checkpoint

        def load_from_checkpoint(folder: str, model: Any = None) -> None:
            check_loaded_by_name(trainer.model, Path(folder))
            load(folder, model)

        self._undo.append(_replaced(trainer, "create_optimizer", create_optimizer))
        self._undo.append(_replaced(trainer, "_load_from_checkpoint", load_from_checkpoint))
        trainer.add_callback(self)
        self._undo.append(partial(trainer.pop_callback, self))

    def _adopt(self, optimizer: Any) -> None:
        """Let an optimizer's saved state carry the loss scale."""
        if optimizer is self._optimizer or not isinstance(optimizer, LeanOptimizer):
            return  # FusedBackward refuses what is not leantune's
        self._optimizer = optimizer
        self._undo.append(optimizer.register_state_dict_post_hook(self._save_loss_scale).remove)
        self._undo.append(optimizer.register_load_state_dict_pre_hook(self._load_loss_scale).remove)

    def _save_loss_scale(self, optimizer: Any, state: dict[str, Any]) -> None:
        if self.loss_scale is not None:
            state["loss_scale"] = self.loss_scale.state_dict()

    def _load_loss_scale(self, optimizer: Any, state: dict[str, Any]) -> None:
        saved: Any = state.get("loss_scale")
        if (saved is None) != (self.loss_scale is None):
            raise StateMismatchError(
                f"the optimizer's state was saved with{'out' if saved is None else ''} a loss scale, and attach was "
                f"called with{'out' if self.loss_scale is None else ''} loss_scale. Resume as it was saved "
                f"({'leave loss_scale out' if saved is None else 'loss_scale=LossScale()'}), or start anew."
            )
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(saved)

    def _restore_optimizer(self) -> None:
        before, settings = self._before
        if _unwrapped(self._trainer.optimizer) is not _unwrapped(before):
            self._trainer.optimizer = before
        self._trainer.optimizer_cls_and_kwargs = settings

    # -- called by the trainer --------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """accelerate has prepared model and optimizer, and a checkpoint has been loaded: put the hooks on."""
        self._release()
        trainer = self._trainer
        parallel = (part for part in trainer.model_wrapped.modules() if isinstance(part, DistributedDataParallel))
        self.fused = FusedBackward(
            _unwrapped(trainer.optimizer),
            next(parallel, trainer.model),
            self.clip,
            self.max_grad_norm,
            self.accumulate,
            self.loss_scale,
            self.process_group,
        )
        self._first, self._probed = True, not self.probes_loss
        if self.exact_savings and not ExactSavings.of(trainer.model):
            chosen: dict[str, bool] = {name: name in self.exact_savings for name in _SAVINGS}
            self._savings = apply_exact_savings(trainer.model, **chosen)
        self._undo_training += [
            _replaced(trainer.accelerator, "backward", self._backward),
            _replaced(trainer.accelerator, "clip_grad_norm_", _clip_nothing),
            _replaced(trainer, "log", self._with_grad_norm(trainer.log)),
        ]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """In the first step: has every trainable parameter got a gradient?"""
        if self._first and self.fused is not None:
            check_all_reached(self._trainer.model, self.fused.reached)
        self._first = False

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Take the hooks off: the model's next backward is an ordinary one."""
        self._release()

    def _backward(self, loss: Tensor, **options: Any) -> None:
        """In place of ``accelerator.backward``."""
        # For optim="lomo" transformers says the rate, which is in the optimizer's groups here.
        unknown = set(options) - {"learning_rate"}
        if unknown:
            raise BackwardError(
                f"accelerator.backward was called with {', '.join(sorted(unknown))}, which fused backward cannot "
                "honour: its graph is freed, and gradients with it. Call accelerator.backward(loss) alone."
            )
        trainer, fused = self._trainer, self.fused
        if fused is None:
            raise BackwardError("backward was called outside of trainer.train(). Call trainer.train().")
        loss = loss / trainer.accelerator.gradient_accumulation_steps  # as accelerate does; Trainer leaves it at 1
        if fused.two_passes and not self._probed:
            scaled = loss if self.loss_scale is None else loss * self.loss_scale.value
            names = {param: name for name, param in trainer.model.named_parameters() if param.requires_grad}
            self._probed = check_second_backward(scaled, names)
        fused.backward(loss, last=trainer.accelerator.sync_gradients)
        # The trainer asks accelerate before it moves the schedule.
        trainer.optimizer._is_overflow = fused.dropped

    def _with_grad_norm(self, log: Any) -> Any:
        def with_grad_norm(logs: dict[str, float], *arguments: Any, **more: Any) -> None:
            if "loss" in logs and self.fused is not None and self.fused.grad_norm is not None:
                logs["grad_norm"] = self.fused.grad_norm
            log(logs, *arguments, **more)

        return with_grad_norm

    def _release(self) -> None:
        """Take off what is in place while training."""
        _run_backwards(self._undo_training)
        if self._savings is not None:
            self._saved = self._savings.report()
            self._savings.remove()
            self._savings = None
        if self.fused is not None:
            self.fused.remove()
            self.fused = None


def _replaced(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Give one object an attribute of its own; the result takes it back."""
    before = owner.__dict__.get(name, MISSING)
    setattr(owner, name, value)

    def undo() -> None:
        if before is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo


def _run_backwards(undo: list[Callable[[], Any]]) -> None:
    while undo:
        undo.pop()()


def _clip_nothing(parameters: Any, max_norm: float, norm_type: float = 2) -> None:
    """In place of ``accelerator.clip_grad_norm_``: the hooks have clipped, and there are no gradients any more."""


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


def _default(args: Any, name: str) -> Any:
    return next(field.default for field in fields(args) if field.name == name)


def _clipping(args: Any, clip: str | None, max_grad_norm: float | None) -> tuple[str, float | None]:
    """(mode, bound) from what `attach` was given, and where that is silent from what the trainer's user has set."""
    chosen = args.max_grad_norm != _default(args, "max_grad_norm")  # the default is nobody's request
    theirs = float(args.max_grad_norm or 0.0) if chosen else None
    if clip is None:
        if max_grad_norm is None and theirs == 0:
            clip = "none"
        else:
            clip = "per_tensor" if max_grad_norm is None and theirs is None else "global"
    if max_grad_norm is None and theirs and clip in CLIP_MODES and clip != "none":
        max_grad_norm = theirs
    checked_bound(clip, max_grad_norm)
    return clip, max_grad_norm


def _checked_savings(exact_savings: bool | Sequence[str]) -> tuple[str, ...]:
    if isinstance(exact_savings, bool):
        return _SAVINGS if exact_savings else ()
    chosen = (exact_savings,) if isinstance(exact_savings, str) else tuple(exact_savings)
    unknown = [name for name in chosen if name not in _SAVINGS]
    if unknown:
        why = "the loss is the trainer's own here; leave it out. " if "loss" in unknown else ""
        raise InvalidArgumentError(
            f"exact_savings names {', '.join(map(repr, unknown))}: {why}It takes True, False, or some of "
            f"{', '.join(_SAVINGS)}."
        )
    return chosen


def _adam_settings(args: Any) -> dict[str, Any]:
    return {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "seed": args.seed,
    }


def _refuse_ignored_optim(args: Any) -> None:
    for name in ("optim", "optim_args"):
        if getattr(args, name) != _default(args, name):
            raise InvalidArgumentError(
                f"the trainer's arguments have {name}={getattr(args, name)!r}, which attach would ignore: it would "
                "build TernaryAdamW. Leave it out, or give attach an optimizer, for example "
                "optimizer=lt.AdamW(model.named_parameters(), lr=...)."
            )


def _refuse_foreign_schedule(trainer: Any, optimizer: LeanOptimizer) -> None:
    """A schedule the user made moves the rate of the optimizer it was made for."""
    schedule = trainer.lr_scheduler
    if schedule is None or getattr(trainer, "_created_lr_scheduler", False):
        return
    driven = getattr(getattr(schedule, "scheduler", schedule), "optimizer", None)
    if _unwrapped(driven) is not optimizer:
        raise InvalidArgumentError(
            f"the trainer was given a schedule for another optimizer ({type(driven).__name__}); its rates would not "
            "reach this one. Build the schedule on the optimizer that attach uses: optimizers=(optimizer, schedule)."
        )


def _refuse_what_cannot_work(trainer: Any, accumulate: str | None) -> None:
    args, kind = trainer.args, trainer.accelerator.distributed_type.value
    if any(isinstance(callback, Attached) for callback in trainer.callback_handler.callbacks):
        raise InvalidArgumentError("this trainer is attached already; call remove() on that handle first.")
    if args.gradient_accumulation_steps > 1 and accumulate is None:
        raise InvalidArgumentError(
            f"gradient_accumulation_steps is {args.gradient_accumulation_steps}, and fused backward frees each "
            "gradient as soon as it is applied, so there is nothing to accumulate. Raise per_device_train_batch_size "
            "(the memory of gradients makes room) and set gradient_accumulation_steps=1, or let sums of gradients "
            "live: accumulate='float32' (4 bytes a parameter) or 'bfloat16' (2, rounded)."
        )
    if accumulate is not None:
        Accumulator(accumulate)
    if trainer.accelerator.scaler is not None or args.fp16:
        raise InvalidArgumentError(
            "fp16=True makes accelerate scale the loss with torch's GradScaler, which unscales gradients after "
            "backward, when they are applied and gone. Use bf16=True, or load the model in float16, set fp16=False and "
            "call attach(trainer, loss_scale=lt.LossScale())."
        )
    if kind in _SHARDED or getattr(trainer.accelerator, "parallelism_config", None) is not None:
        raise InvalidArgumentError(
            f"the trainer runs under {kind}, which keeps, reduces or shards gradients in its own way. attach works in "
            "one process and with plain data parallel (torchrun without a plugin). For FSDP2 call fully_shard and "
            "lt.FusedBackward in a loop of your own."
        )
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise InvalidArgumentError(
            "the model was sharded when it was loaded (distributed_config), and transformers averages gradients in "
            "hooks that run after they are freed. Load it whole, or shard it yourself and use lt.FusedBackward."
        )
    if args.n_gpu > 1:
        raise InvalidArgumentError(
            f"the trainer would copy the model to {args.n_gpu} GPUs in one process (DataParallel). Launch one process "
            "a GPU with torchrun, or set CUDA_VISIBLE_DEVICES to one."
        )
    if args.auto_find_batch_size:
        raise InvalidArgumentError(
            "auto_find_batch_size starts over with a smaller batch after running out of memory, and a fused backward "
            "may have moved part of the weights by then. Set per_device_train_batch_size."
        )
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        if (getattr(args, name, None) or {}).get("use_reentrant"):
            raise InvalidArgumentError(
                f"{name} asks for use_reentrant, which runs backwards inside backward and would update weights in "
                "pieces. Write use_reentrant: False."
            )
