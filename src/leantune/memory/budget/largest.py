"""The largest batch, length and model of a shape that fit a budget: solved by bisection over the closed form."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from leantune.memory.budget.run_stages import stage_bytes
from leantune.memory.budget.sharding import Parallel
from leantune.memory.closed_form.model_shape import ModelShape
from leantune.memory.closed_form.settings import RunSettings

MOST_ROWS = 4096
MOST_TOKENS = 1 << 21
MOST_LAYERS = 256
_LENGTH_STEP = 64


@dataclass(frozen=True)
class Largest:
    """Each with everything else as it is; 0: not even the smallest fits."""

    batch_size: int
    length: int
    """Tokens, a multiple of 64."""
    layers: int
    """Blocks of this width."""
    parameters: int
    """Of a model with so many blocks."""

    def __str__(self) -> str:
        return (
            f"batch {self.batch_size}, or {self.length:,} tokens a row, or {self.layers} blocks of this width "
            f"({self.parameters:,} parameters), everything else as it is"
        )


def largest(shape: ModelShape, settings: RunSettings, parallel: Parallel, budget: int) -> Largest:
    """Solve for each in turn."""

    def need(a_shape: ModelShape, a_settings: RunSettings) -> int:
        return stage_bytes(a_shape, a_settings, parallel).peak.total

    batch = solve(lambda rows: need(shape, settings.with_rows(rows)), budget, MOST_ROWS)
    most = MOST_TOKENS // settings.batch_size // _LENGTH_STEP
    length = solve(lambda n: need(shape, replace(settings, length=n * _LENGTH_STEP)), budget, most)
    layers = solve(lambda n: need(replace(shape, layers=n), settings), budget, MOST_LAYERS)
    return Largest(batch, length * _LENGTH_STEP, layers, parameters(replace(shape, layers=layers)) if layers else 0)


def parameters(shape: ModelShape) -> int:
    """Number of parameters of a model."""
    total = 0
    for _, size in shape.weights():
        count = 1
        for length in size:
            count *= length
        total += count
    return total


def solve(need: Callable[[int], int], budget: int, most: int) -> int:
    """The largest n from 1 to ``most`` with need(n) <= budget, 0 for none; ``need`` must not fall.

    Memory grows almost in a straight line: the line through the first two points says where to look, then a bracket
    shrinks by interpolation, and by halves where that gets nowhere. Six evaluations usually.

    >>> solve(lambda n: 100 + 7 * n, 200, 1000), solve(lambda n: 500, 200, 10), solve(lambda n: n, 200, 10)
    (14, 0, 10)
    """
    low, at_low = 1, need(1)
    if at_low > budget:
        return 0
    high, at_high = _above(need, budget, most, at_low)
    if at_high <= budget:
        return most
    halve = False
    while high - low > 1:
        share = 0.5 if halve else (budget - at_low) / (at_high - at_low)
        middle = min(high - 1, max(low + 1, low + int(share * (high - low))))
        needed, halve = need(middle), not halve and not 0.02 < share < 0.98
        if needed <= budget:
            low, at_low = middle, needed
        else:
            high, at_high = middle, needed
    return low


def _above(need: Callable[[int], int], budget: int, most: int, at_one: int) -> tuple[int, int]:
    """(n, need(n)) a little above the edge, if a straight line is right; ``most`` where nothing up to it is above."""
    slope = need(min(2, most)) - at_one
    high = most if slope <= 0 else min(most, 3 + int(1.05 * (budget - at_one) / slope))
    while (needed := need(high)) <= budget and high < most:
        high = min(most, 2 * high)
    return high, needed
