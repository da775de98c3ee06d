"""A stretch of forward that is run again in backward, to get back the tensors that autograd saved inside it.

Used where what is saved has no name: the mask of a dropout, the steps of a GELU written out in Python. The operators
and their order are those of forward, so the n-th tensor saved is the same, bit for bit.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from leantune.activations.exact.recipe import Held, Hooks, Part, Recipe, Remade, hold


class Region:
    """One run of a stretch of forward.

    Args:
        function: called with ``parts``' tensors, it runs the stretch again, on an input that requires a gradient.
        parts: what is kept instead of the tensors saved inside.
    """

    def __init__(self, function: Callable[..., object], parts: tuple[Part | Recipe, ...]) -> None:
        self._parts = parts
        self._function = function
        self._held: list[Held | Remade] = []
        self._packed = 0
        self._again: dict[int, Tensor] = {}

    def leaves(self) -> list[Tensor]:
        """The tensors that have to be kept."""
        return Recipe(torch.empty_like, self._parts).leaves()

    def pack(self, outer: Hooks | None) -> "Inside":
        """What autograd holds in place of the tensor that is being saved."""
        if not self._packed:
            self._held = [hold(part, outer) for part in self._parts]
        self._packed += 1
        return Inside(self, self._packed - 1)

    def close(self) -> None:
        """Forward has left the stretch: what it needs is held as the hooks around want it, and nothing else."""
        self._parts = ()

    def saved(self, number: int) -> Tensor:
        """The tensor that was saved as this ``number``; each run hands every one over once, to be freed after use."""
        if number not in self._again:
            self._again = dict(enumerate(saved_by(self._function, *[held.tensor() for held in self._held])))
        return self._again.pop(number)


class Inside:
    """A tensor saved inside a `Region`."""

    __slots__ = ("_number", "_region")

    def __init__(self, region: Region, number: int) -> None:
        self._region = region
        self._number = number

    def tensor(self) -> Tensor:
        return self._region.saved(self._number)


def saved_by(function: Callable[..., object], *tensors: Tensor) -> list[Tensor]:
    """What autograd saves while ``function(*tensors)`` runs, in order.

    >>> x = torch.ones(2, requires_grad=True)
    >>> saved_by(torch.sin, x)
    [tensor([1., 1.])]
    """
    found: list[Tensor] = []

    def pack(tensor: Tensor) -> None:
        found.append(tensor.detach())

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, _never_unpacked):
        function(*tensors)
    return found


def _never_unpacked(_: None) -> Tensor:
    raise RuntimeError("a graph that was made to look at what it saves has no backward")
