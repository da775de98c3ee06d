"""The largest batch, length and model of a shape that fit a budget: solved by bisection over the closed form."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from leantune.memory.budget.run_stages import peak_bytes
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
    known: dict[tuple[int, int, int], int] = {}

    def need(a_shape: ModelShape, a_settings: RunSettings) -> int:
        key = (a_shape.layers, a_settings.batch_size, a_settings.length)
        if key not in known:
            known[key] = peak_bytes(a_shape, a_settings, parallel)
        return known[key]

    batch = solve(lambda rows: need(shape, settings.with_rows(rows)), budget, MOST_ROWS, settings.batch_size)
    most, now = MOST_TOKENS // settings.batch_size // _LENGTH_STEP, max(1, settings.length // _LENGTH_STEP)
    length = solve(lambda n: need(shape, replace(settings, length=n * _LENGTH_STEP)), budget, most, now)
    layers = solve(lambda n: need(replace(shape, layers=n), settings), budget, MOST_LAYERS, shape.layers)
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


def solve(need: Callable[[int], int], budget: int, most: int, start: int = 1) -> int:
    """The largest n from 1 to ``most`` with need(n) <= budget, 0 for none; ``need`` must not fall.

    Memory grows almost in a straight line: the line through two points, ``start`` first, says where to look, then a
    bracket shrinks by interpolation, and by halves where that gets nowhere. Four evaluations usually.

    >>> solve(lambda n: 100 + 7 * n, 200, 1000), solve(lambda n: 500, 200, 10), solve(lambda n: n, 200, 10)
    (14, 0, 10)
    """
    low = min(start, most)
    at_low = need(low)
    if at_low <= budget:
        low, at_low, high, at_high = _bracket(need, budget, most, low, at_low)
    else:
        high, at_high = low, at_low
        if low == 1 or (at_low := need(1)) > budget:
            return 0
        low = 1
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


def _bracket(need: Callable[[int], int], budget: int, most: int, low: int, at_low: int) -> tuple[int, int, int, int]:
    """(n, need(n), m, need(m)) with n within the budget and m not, close to each other if a straight line is right;
    both ``most`` where nothing up to it is above."""
    probe = min(most, 2 * low)
    while low < most:
        needed = need(probe)
        if needed > budget:
            return low, at_low, probe, needed
        slope = (needed - at_low) / (probe - low)
        low, at_low = probe, needed
        probe = most if slope <= 0 else min(most, low + 1 + int((budget - needed) / slope))
    return low, at_low, low, at_low
