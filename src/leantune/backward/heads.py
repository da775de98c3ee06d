"""Output heads whose gradients are never whole: where the loss without logits hands them over in tiles, and where not.

A head's gradient is taken in tiles where, in the graph that backward is about to run over, the loss is the only one to
give it a gradient, and nobody needs to see it whole.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from leantune.backward.graph import head_nodes
from leantune.backward.targets import Target
from leantune.errors import InvalidArgumentError
from leantune.optim.gradient import Walk
from leantune.optim.row_shard import is_sharded

MODES = ("tiles", "whole")


class Heads:
    """How the gradients of output heads under `leantune.linear_cross_entropy` are taken.

    Args:
        mode: "tiles" where possible, or "whole".
        averaged: gradients are averaged over processes, which is done with whole ones.

    Raises InvalidArgumentError for another mode.
    """

    def __init__(self, mode: str, averaged: bool) -> None:
        if mode not in MODES:
            raise InvalidArgumentError(f"head is {mode!r}; write one of {', '.join(map(repr, MODES))}.")
        self.mode = mode
        self._averaged = averaged
        self._whole: dict[str, str] = {}  # name of a head -> why its last gradient was whole; "": it was not

    @contextmanager
    def in_tiles(
        self, loss: Tensor, targets: Mapping[Tensor, Target], gathers: bool, receive: Callable[[Tensor, Walk], None]
    ) -> Iterator[None]:
        """Within this context backward from ``loss`` calls ``receive(head, walk)`` where a head's gradient can come in
        tiles.

        ``gathers``: gradients are only added up in this backward.
        """
        nodes = []
        self._whole.clear()
        for node, alone in head_nodes(loss):
            target = targets.get(node.head)
            if target is None:
                continue
            why = self._why_whole(node.head, target, alone, gathers)
            self._whole[target.name] = why
            if not why:
                node.taker = functools.partial(receive, node.head)
                nodes.append(node)
        try:
            yield
        finally:
            for node in nodes:
                node.taker = None

    def report(self) -> str:
        """One line for each head that the last backward reached."""
        if not self._whole:
            return "no output head's gradient has gone through fused.backward and linear_cross_entropy"
        return "\n".join(
            f"{name}: gradient whole, in one buffer of the weight's dtype: {why}"
            if why
            else f"{name}: gradient in tiles of vocabulary rows, never whole"
            for name, why in self._whole.items()
        )

    def _why_whole(self, head: Tensor, target: Target, alone: bool, gathers: bool) -> str:
        if self.mode == "whole":
            return "head='whole' was asked for"
        if not alone:
            return "something else gives it a gradient too (a tied embedding, a second loss)"
        if not target.optimizer.tileable:
            return f"{type(target.optimizer).__name__} looks at whole columns"
        if self._averaged or is_sharded(head):
            return "it is averaged over processes"
        if gathers:
            return "it is accumulated over micro-batches"
        if _is_watched(head, target):
            return "a hook on it wants to see it"
        return ""


def _is_watched(head: Tensor, target: Target) -> bool:
    """Whether a hook of somebody else may change the gradient or use it. One whose ``only_watches`` is True can do
    without: it is called with None."""
    hooks = {**(head._backward_hooks or {}), **(getattr(head, "_post_accumulate_grad_hooks", None) or {})}
    hooks.pop(target.handle.id, None)
    return any(not getattr(hook, "only_watches", False) for hook in hooks.values())
