"""The kinds of layers that `apply_velora` knows, and the one a module is of."""

from torch import nn

from leantune.activations.velora.conv import ConvKind
from leantune.activations.velora.kind import LayerKind
from leantune.activations.velora.layer import Layer, is_under_velora, replaced_forward
from leantune.activations.velora.linear import LinearKind, TransposedLinearKind
from leantune.activations.velora.lora import LoraKind
from leantune.activations.velora.recurrent import RecurrentKind
from leantune.errors import InvalidArgumentError, InvalidTypeError

KINDS: tuple[LayerKind, ...] = (LinearKind(), TransposedLinearKind(), ConvKind(), RecurrentKind(), LoraKind())
"""In the order in which they are asked."""


def layer_of(name: str, module: nn.Module, num_groups: int) -> Layer:
    """A layer for ``module``, which is not changed. Raises InvalidArgumentError or InvalidTypeError where VeLoRA
    cannot be put into it."""
    if is_under_velora(module):
        raise InvalidArgumentError(f"{name} is under VeLoRA already; call remove() on its handle first.")
    kind = next((kind for kind in KINDS if kind.takes(module)), None)
    if kind is None:
        raise InvalidTypeError(
            f"{name} is a {type(module).__name__}; VeLoRA is for {', '.join(kind.label for kind in KINDS)}. Leave it "
            "out of target_modules."
        )
    if replaced_forward(module) is not None:
        raise InvalidTypeError(
            f"the forward of {name} was replaced by another library, and VeLoRA would bypass that. Call apply_velora "
            "first, or leave the layer out of target_modules."
        )
    return Layer(name, module, kind, kind.sites(name, module, num_groups))
