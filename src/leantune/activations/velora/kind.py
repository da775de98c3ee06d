"""A kind of layer that VeLoRA can be put into: the interface, and what its implementations share."""

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from leantune.errors import InvalidArgumentError

if TYPE_CHECKING:
    from leantune.activations.velora.layer import Layer
    from leantune.activations.velora.site import Site


class LayerKind(Protocol):
    """One kind of layer. It keeps nothing itself: what belongs to a layer is in its sites."""

    label: str
    """What a user calls it, in errors."""

    def takes(self, module: nn.Module) -> bool:
        """Whether ``module`` is of this kind, looked at by class alone; must not import a library that defines it."""

    def sites(self, name: str, module: nn.Module, num_groups: int) -> "list[Site]":
        """The inputs that the layer would keep and that VeLoRA projects instead. Changes nothing.

        Raises InvalidArgumentError or InvalidTypeError with what cannot work, why, and what to do instead.
        """

    def forward(self, layer: "Layer", *args: Any, **kwargs: Any) -> Any:
        """What the module's forward does from now on in training batches, with ``layer.sites[i](x)`` in place of the
        products. Other batches run the module's own forward."""


def own_type(module: nn.Module) -> type:
    """The class of ``module``, also where fully_shard has put its own in front."""
    line = type(module).__mro__
    return line[2] if line[1].__name__ == "FSDPModule" else line[0]


def refuse_frozen(name: str, module: nn.Module, *weights: str) -> None:
    """Raise InvalidArgumentError where one of the named weights is not trained."""
    for weight in weights:
        tensor: Tensor = getattr(module, weight)
        if not tensor.requires_grad:
            raise InvalidArgumentError(
                f"{weight} of {name} is frozen: it keeps no input, so VeLoRA has nothing to save. Leave it out."
            )
