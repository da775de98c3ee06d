"""Which steps' gradients enter the stored second moment.

A running mean over a thousand steps does not need all of them, and storing v is a third of a step's work. So v is
stored at multiples of an interval that leaves `SAMPLES` of them in its window, min(t, 1 / (1 - beta2)) steps: every
step at first, and every fourth in the long run at beta2 = .999. A gradient that is stored stands for the steps since s,
the last such step; one that is not counts in its own step alone:

    stored:      v_t = beta2^(t - s) v_s + (1 - beta2^(t - s)) g_t^2     weights of all g^2: 1 - beta2^t
    otherwise:   v_t = beta2 v_s + (1 - beta2) g_t^2                     1 - beta2^(s + 1)
"""

import functools
from typing import NamedTuple

SAMPLES = 32
LONGEST_INTERVAL = 4


class Sampling(NamedTuple):
    """A step's part in the second moment. ``stored``: whether its v is; ``beta2``: decay of what was; ``bias``: 1 / sum
    of the weights in its v."""

    stored: bool
    beta2: float
    bias: float


@functools.lru_cache(maxsize=256)
def sampling(step: int, beta2: float) -> Sampling:
    """How step number ``step`` (from 1) uses and stores v.

    >>> [step for step in (*range(61, 70), *range(125, 137)) if sampling(step, 0.999).stored]
    [61, 62, 63, 64, 66, 68, 126, 128, 132, 136]
    >>> all(sampling(step, 0.95).stored for step in range(1, 1000))
    True
    """
    last = last_stored(step - 1, beta2)
    if step == last_stored(step, beta2):
        return Sampling(True, beta2 ** (step - last), 1 / (1 - beta2**step))
    return Sampling(False, beta2, 1 / (1 - beta2 ** (last + 1)))


def every_step(step: int, beta2: float) -> Sampling:
    """The same for a state in fp32, which takes every gradient."""
    return Sampling(True, beta2, 1 / (1 - beta2**step))


def last_stored(step: int, beta2: float) -> int:
    """The last step up to ``step`` whose v was stored; 0 before the first."""
    # Intervals are powers of two and never shrink, so multiples of one are multiples of those before.
    interval, window = 1, min(step, 1 / (1 - beta2))
    while 2 * interval <= min(LONGEST_INTERVAL, window / SAMPLES):
        interval *= 2
    return step - step % interval


def stored_share(step: int, beta2: float) -> float:
    """Sum of the weights in the stored v after ``step``, as a share of those in v_t of every step."""
    return (1 - beta2 ** last_stored(step, beta2)) / (1 - beta2**step) if step else 1.0
