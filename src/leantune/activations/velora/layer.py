"""A layer under VeLoRA: what `apply_velora` leaves on a module, and the forward that it runs from then on."""

import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from leantune.activations.exact.forwards import SavingForward
from leantune.activations.velora.kind import LayerKind
from leantune.activations.velora.site import Site
from leantune.errors import StateMismatchError

_MARK = "_leantune_velora"


@dataclass(eq=False)
class Layer:
    """One module, the kind it is of, and its sites."""

    name: str
    module: nn.Module
    kind: LayerKind
    sites: list[Site]

    def enter(self) -> None:
        """Put it into its module."""
        setattr(self.module, _MARK, self)
        _replace_forward(self.module, types.MethodType(_forward, self.module))

    def check_on_top(self) -> None:
        """Raise StateMismatchError where something else has replaced the module's forward since."""
        if getattr(replaced_forward(self.module), "__func__", None) is not _forward:
            raise StateMismatchError(
                f"the forward of {self.name} was replaced after apply_velora (hooks of another library do that); "
                "restoring it would drop that change. Remove the later change first."
            )

    def leave(self) -> None:
        """Give the module its own forward back."""
        delattr(self.module, _MARK)
        _replace_forward(self.module, None)


def is_under_velora(module: nn.Module) -> bool:
    """Whether a handle holds this module."""
    return hasattr(module, _MARK)


def replaced_forward(module: nn.Module) -> Any:
    """The forward that was put in place of the class's, under exact savings' (which call it); None where none was."""
    forward = module.__dict__.get("forward")
    return forward.replaced if isinstance(forward, SavingForward) else forward


def _replace_forward(module: nn.Module, forward: Any) -> None:
    """Put ``forward`` where `replaced_forward` looks for it: exact savings, applied before or after, stay around it."""
    saving = module.__dict__.get("forward")
    if isinstance(saving, SavingForward):
        saving.replaced = forward
    elif forward is None:
        del module.forward
    else:
        module.forward = forward


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    layer: Layer = getattr(module, _MARK)
    wide = any(getattr(site.product, "wide", False) for site in layer.sites)
    probed = any(site.probe is not None for site in layer.sites)
    if args and isinstance(args[0], Tensor) and not torch.compiler.is_compiling():
        for site in layer.sites:
            site.given = StorageWeakRef(args[0].untyped_storage())
    if wide or probed or (module.training and torch.is_grad_enabled()):
        return layer.kind.forward(layer, *args, **kwargs)
    return type(module).forward(module, *args, **kwargs)
