"""What can be read off an autograd graph before backward runs over it: which parameters it reaches, and which output
heads hand over their gradient in tiles."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor


class HeadNode(NamedTuple):
    """A node that can hand over the gradient of an output head in tiles (leantune.activations.tiled_cross_entropy)."""

    node: Any
    """It has a ``head``, a leaf, and a ``taker`` to be set."""
    alone: bool
    """Nothing else in the graph gives the head a gradient: it is untied, and used once."""


def reached_by(loss: Tensor, params: Mapping[Tensor, Any]) -> set[Tensor]:
    """Which of ``params`` backward from ``loss`` will reach."""
    variables = (getattr(node, "variable", None) for node in _nodes(loss))
    return {variable for variable in variables if variable is not None and variable in params}


def head_nodes(loss: Tensor) -> list[HeadNode]:
    """The nodes under ``loss`` that can hand over their head's gradient in tiles."""
    found: list[Any] = []
    edges: Counter[int] = Counter()
    for node in _nodes(loss):
        if getattr(node, "head", None) is not None:
            found.append(node)
        for following, _ in node.next_functions:
            variable = getattr(following, "variable", None)
            if variable is not None:
                edges[id(variable)] += 1
    return [HeadNode(node, edges[id(node.head)] == 1) for node in found]


def _nodes(loss: Tensor) -> Iterator[Any]:
    """Every node of the graph once."""
    seen: set[Any] = set()
    nodes = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes.extend(following for following, _ in node.next_functions)
