"""Log-ternary blocks: the second moment as a level, a step and one trit an element, all in the logarithm.

L(v) is the float's own bit pattern read as an integer, in octaves (2^23 units an octave): a piecewise-linear log2,
monotone, and exactly inverted by reading the integer back as a float. A block keeps
  level l: the mean of L(v), rounded to the upper 16 bits of the pattern and therefore stored as a bfloat16 number;
  step  d: octaves between neighbouring levels, bfloat16;
  trits x: in {-1, 0, +1}, stochastically rounded, decoding to v = L^-1(l + d x).
A block whose mean v is below 2^-124 is empty: l = d = x = 0, and decodes to 0.
"""

import torch
from torch import Tensor

OCTAVE = float(1 << 23)
FLOOR = 2.0**-10
"""v is floored at this fraction of its block's mean before the logarithm is taken."""
LEAST_RAISE = 8
"""Raises of a level below this many units of 2^-7 octave are left out: ordinary noise would ratchet it upwards."""
FIRST_STEP = 1.22
"""The first log-step of a block is this times the standard deviation of L(v): the MSE-optimal ternary step of a
Gaussian."""
MIN_STEP, MAX_STEP = 0.05, 8.0
_EMPTY = 2.0**-124
_MAX_CENTRE = 0x7F7F0000 - 8 * (1 << 23)  # the largest level: l + d x stays a finite float, and an int32


def decode(trits: Tensor, level: Tensor, step: Tensor) -> Tensor:
    """v = L^-1(l + d x), fp32 (rows, blocks, size), from trits of that shape and bfloat16 level and step (rows,
    blocks).

    An empty block decodes to 0, and so does what would lie below the smallest number.
    """
    centre = level.view(torch.int16).to(torch.int32) << 16
    octaves = (step.float() * OCTAVE).to(torch.int32)
    pattern = trits.to(torch.int32).mul_(octaves.unsqueeze(-1)).add_(centre.unsqueeze(-1)).clamp_(min=0)
    return pattern.view(torch.float32)


def encode(
    values: Tensor, live: Tensor, previous_trits: Tensor, previous_step: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Encode v, fp32 blocks (rows, blocks, size), given the block's previous trits and step.

    ``live`` (blocks, size) fp32: 1 where an element counts, 0 where it is absent or dead: there v is 0 and the trit 0;
    ``uniform``: fp32 in [0, 1), the random number of each element. Returns (trits fp32, level bfloat16, step bfloat16).

    The step follows L(v): it is the slope of L(v) on the trits it was last coded with, cov(L(v), x) / var(x). Refitted
    from new trits it would shrink at every encode until they carry nothing; as a ratio of spreads every jump of a
    heavy-tailed gradient would widen it.
    """
    counts = live.sum(dim=-1).clamp_(min=1)
    mean = values.sum(dim=-1).div_(counts)
    # What an empty block decoded to must not make it a block of its own.
    empty = mean <= _EMPTY
    floored = torch.maximum(values, (mean * FLOOR).clamp_(min=2.0**-126).unsqueeze(-1))
    # L(v) - L(mean v): a few octaves at most, so that fp32 holds it well.
    centre = mean.view(torch.int32)
    offset = floored.view(torch.int32).sub(centre.unsqueeze(-1)).float().mul_(live * (1 / OCTAVE))
    average = offset.sum(dim=-1).div_(counts)
    upper = (centre + (average * OCTAVE).to(torch.int32) + (1 << 15) >> 16).clamp_(max=_MAX_CENTRE >> 16)
    step = _next_step(offset, average, counts, previous_trits, previous_step).masked_fill_(empty, 0.0)
    level = upper.to(torch.int16).view(torch.bfloat16).masked_fill_(empty, 0.0)
    inverse = torch.where(empty, 0.0, 1.0 / step.float())
    shift = ((upper << 16) - centre).float().mul_(1 / OCTAVE)
    trits = offset.sub_(shift.unsqueeze(-1)).mul_(inverse.unsqueeze(-1)).clamp_(-1, 1).add_(uniform).floor_().mul_(live)
    return trits, _raised(level, step, values, empty), step


def _raised(level: Tensor, step: Tensor, values: Tensor, empty: Tensor) -> Tensor:
    """The level, raised by what lies beyond it and its step: log2 of sum v / sum min(v, L^-1(l + d)).

    A trit reaches no further than d above l. Where few elements of a block are alive the live ones lie
    beyond, and what each encode cut off would compound: v would settle at (1 - beta2) g^2, not at g^2.
    """
    reach = decode(torch.ones_like(level, dtype=torch.float32).unsqueeze(-1), level, step)
    wanted, kept = (v.sum(dim=-1).view(torch.int32).to(torch.int64) for v in (values, torch.minimum(values, reach)))
    missing = wanted - kept + (1 << 15) >> 16
    missing.masked_fill_((missing < LEAST_RAISE) | empty, 0)
    upper = level.view(torch.int16).to(torch.int64) + missing
    return upper.clamp_(max=_MAX_CENTRE >> 16).to(torch.int16).view(torch.bfloat16)


def _next_step(
    offset: Tensor, average: Tensor, counts: Tensor, previous_trits: Tensor, previous_step: Tensor
) -> Tensor:
    """The block's new log-step, bfloat16 (rows, blocks); ``offset`` is L(v) less a number of the block, in octaves, 0
    where nothing counts, and ``average`` its mean (rows, blocks)."""
    once, twice = previous_trits.sum(dim=-1), previous_trits.square().sum(dim=-1)  # whole numbers
    spread = twice.mul_(counts).sub_(once.square())
    shared = (offset * previous_trits).sum(dim=-1).sub_(average * once).mul_(counts)
    followed = torch.where(spread > 0, shared / spread, previous_step.float())
    square = offset.square().sum(dim=-1).div_(counts)
    first = square.sub_(average.square()).clamp_(min=0).sqrt_().mul_(FIRST_STEP)
    return torch.where(previous_step == 0, first, followed).clamp_(MIN_STEP, MAX_STEP).to(torch.bfloat16)
