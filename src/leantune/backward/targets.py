"""What a FusedBackward hooks: every trainable parameter, with who updates it. What cannot work is refused here, before
anything is hooked."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from leantune.backward.clip import CLIP_MODES
from leantune.errors import InvalidArgumentError, InvalidTypeError
from leantune.optim.base import LeanOptimizer


@dataclass
class Target:
    """One hooked parameter: who updates it and where it stands."""

    name: str
    optimizer: LeanOptimizer
    group: int
    place: int
    handle: Any = None


def checked_bound(clip: str, max_grad_norm: float | None) -> float:
    """The bound of a clip mode, 1.0 where none was set. Raises InvalidArgumentError for what cannot be honoured."""
    if clip not in CLIP_MODES:
        raise InvalidArgumentError(f"clip is {clip!r}; write one of {', '.join(map(repr, CLIP_MODES))}.")
    if clip == "none" and max_grad_norm is not None:
        raise InvalidArgumentError(
            "max_grad_norm is set but clip='none' would ignore it. Use clip='global' (exact) or 'per_tensor'."
        )
    if max_grad_norm is not None and not 0 < float(max_grad_norm) < float("inf"):
        raise InvalidArgumentError(f"max_grad_norm is {max_grad_norm}; it must be a finite number above 0.")
    return 1.0 if max_grad_norm is None else float(max_grad_norm)


def collect(optimizers: Iterable[Any], model: nn.Module | None) -> dict[Tensor, Target]:
    """Every trainable parameter of the optimizers with its target; everything that cannot work is refused here."""
    names = {} if model is None else {param: name for name, param in model.named_parameters()}
    targets: dict[Tensor, Target] = {}
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
                    targets[param] = Target(name, optimizer, index, place)
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
