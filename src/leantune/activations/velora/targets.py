"""Which modules the names in ``target_modules`` mean. A name that means nothing is an error with close names."""

import difflib
import re
from collections.abc import Sequence

from torch import nn

from leantune.errors import InvalidArgumentError, InvalidTypeError

Named = list[tuple[str, nn.Module]]


def matched_modules(model: nn.Module, targets: Sequence[str] | str) -> Named:
    """Modules the targets name, in the model's order. Every target must match something.

    ``targets``: ends of dotted names, or one regular expression over whole names.
    """
    named = [(name, module) for name, module in model.named_modules() if name]
    if isinstance(targets, str):
        try:
            found = [pair for pair in named if re.fullmatch(targets, pair[0])]
        except re.error as error:
            raise InvalidArgumentError(
                f"target_modules: {targets!r} is no regular expression ({error}); a list gives ends of names."
            ) from None
        if not found:
            raise InvalidArgumentError(f"the expression {targets!r} matches no module. {_close(targets, named)}")
        return found
    if not isinstance(targets, Sequence) or not all(isinstance(target, str) for target in targets):
        raise InvalidTypeError(
            f'target_modules is {targets!r}; it takes a list of names, for example ["down_proj"], or one regular '
            "expression."
        )
    if not targets:
        raise InvalidArgumentError('target_modules is empty; name at least one, for example ["down_proj"].')
    for target in targets:
        if not any(ends_with(name, target) for name, _ in named):
            _refuse_parameter(model, target)
            raise InvalidArgumentError(f"target_modules: {target!r} matches no module. {_close(target, named)}")
    return [pair for pair in named if any(ends_with(pair[0], target) for target in targets)]


def ends_with(name: str, target: str) -> bool:
    """Whether ``target`` is the dotted name ``name``, or its end."""
    return name == target or name.endswith("." + target)


def _refuse_parameter(model: nn.Module, target: str) -> None:
    """Mixtures of experts keep all experts' weights in one parameter, under the name their layers used to have."""
    for name, parameter in model.named_parameters():
        if ends_with(name, target):
            shape = tuple(parameter.shape)
            stack = f"the weights of {shape[0]} experts in one tensor" if len(shape) == 3 else "a tensor"
            raise InvalidArgumentError(
                f"target_modules: {target!r} is a parameter ({name}, {stack} of shape {shape}), not a module: there is "
                "no layer whose input VeLoRA could project. Name layers that are modules."
            )


def _close(target: str, named: Named) -> str:
    leaves = sorted({name.rpartition(".")[2] for name, module in named if not any(True for _ in module.children())})
    weighty = {name.rpartition(".")[2] for name, module in named if getattr(module, "weight", None) is not None}
    close = difflib.get_close_matches(target.rpartition(".")[2], leaves, n=3, cutoff=0.4)
    known = [leaf for leaf in leaves if leaf in weighty]
    return f"Did you mean {', '.join(close)}?" if close else f"Layers here: {', '.join(known[:12]) or 'none'}."
