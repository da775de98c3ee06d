"""Gradients that the first of two passes keeps, so that the second need not make them again."""

from collections import deque

from torch import Tensor


class KeptGradients:
    """The gradients that came last, of the layers nearest to the input, as far as ``budget`` bytes hold them.

    Backward reaches those layers last, so a second one that does not need them stops before it gets there.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._held: deque[tuple[Tensor, Tensor]] = deque()
        self._bytes = 0

    def offer(self, param: Tensor, grad: Tensor) -> None:
        """Hold ``grad``, for which the earliest held make room; a gradient beyond the budget empties it."""
        if not self.budget:
            return
        self._held.append((param, grad))
        self._bytes += grad.nbytes
        while self._bytes > self.budget:
            self._bytes -= self._held.popleft()[1].nbytes

    def __contains__(self, param: Tensor) -> bool:
        return any(held is param for held, _ in self._held)

    def take(self) -> tuple[Tensor, Tensor] | None:
        """A parameter and its gradient, which is no longer held; None when there are no more."""
        if not self._held:
            return None
        param, grad = self._held.popleft()
        self._bytes -= grad.nbytes
        return param, grad

    def clear(self) -> None:
        """Drop all."""
        self._held.clear()
        self._bytes = 0
