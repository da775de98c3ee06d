"""In which order rows are trained on: random, with the longest in the first step."""

from collections.abc import Iterator
from typing import Any

import numpy
from torch.utils.data import Sampler

STEPS_SORTED = 50
"""Rows of so many steps are sorted together where steps of rows of like length are wanted."""


class LongestFirst(Sampler[int]):
    """Positions of rows, in an order drawn by seed and epoch alone, so that a resumed run goes on in the same one.

    The first step of the first epoch holds the longest rows: a run that does not fit ends in its first step, not
    hours in (trap A7).

    Args:
        lengths: tokens of each row.
        rows: of a step, over all micro-batches and processes.
        grouped: steps of rows of like length: little padding, the order of steps still random.
    """

    def __init__(self, lengths: Any, rows: int, seed: int, *, grouped: bool = False) -> None:
        self._lengths = numpy.asarray(lengths)
        self._rows, self._seed, self._grouped = rows, seed, grouped
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next iteration is of."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = numpy.random.default_rng((self._seed, self._epoch)).permutation(len(self))
        first = order[:0]
        if self._epoch == 0:
            longest = numpy.argsort(-self._lengths[order], kind="stable")[: self._rows]
            first, order = order[longest], numpy.delete(order, longest)
        if self._grouped:
            order = self._of_like_length(order)
        yield from first.tolist()
        yield from order.tolist()

    def _of_like_length(self, order: numpy.ndarray) -> numpy.ndarray:
        """Within every stretch of rows, steps of neighbours in length; those that are not full stay last."""
        random = numpy.random.default_rng((self._seed, self._epoch, 1))
        whole: list[numpy.ndarray] = []
        stretch = STEPS_SORTED * self._rows
        rest = order[:0]
        for start in range(0, len(order), stretch):
            part = order[start : start + stretch]
            part = part[numpy.argsort(-self._lengths[part], kind="stable")]
            full = len(part) // self._rows * self._rows
            whole += list(part[:full].reshape(-1, self._rows))
            rest = numpy.concatenate([rest, part[full:]])
        mixed = [whole[place] for place in random.permutation(len(whole))]
        return numpy.concatenate([*mixed, rest])
