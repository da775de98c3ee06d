"""How far the logits of two models lie apart, on a few rows of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS, LENGTH = 4, 24


@dataclass(frozen=True)
class LogitDifference:
    """``largest``: the largest absolute difference of two logits. ``relative``: the RMS of the differences over the
    RMS of the reference's logits, each row of logits less its mean (softmax does not see that)."""

    largest: float
    relative: float


def probe_tokens(vocabulary: int, first: Sequence[int] = ()) -> Tensor:
    """(4, 24) token ids, the same each time; ids in ``first`` (tokens trained by themselves) stand at the beginning.

    >>> probe_tokens(100, first=[7, 8]).flatten()[:2].tolist()
    [7, 8]
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (ROWS * LENGTH,), generator=generator)
    chosen = torch.tensor(list(first)[: ROWS * LENGTH // 2], dtype=torch.int64)
    ids[: len(chosen)] = chosen
    return ids.view(ROWS, LENGTH)


@torch.no_grad()
def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Float32 logits (rows, tokens, vocabulary) on the CPU: 4 bytes each."""
    out = model(input_ids=tokens.to(model.device), use_cache=False).logits
    return out.float().cpu()


def logit_difference(reference: Tensor, other: Tensor) -> LogitDifference:
    """Compare ``other`` with ``reference``, both (..., vocabulary). Not a number anywhere counts as infinitely far.

    >>> logit_difference(torch.tensor([[1.0, -1.0]]), torch.tensor([[1.5, -1.5]]))
    LogitDifference(largest=0.5, relative=0.5)
    """
    if reference.shape != other.shape or not (torch.isfinite(reference).all() and torch.isfinite(other).all()):
        return LogitDifference(float("inf"), float("inf"))
    difference = other - reference
    scale = float(_centred(reference).square().mean().sqrt())
    moved = float(_centred(difference).square().mean().sqrt())
    relative = moved / scale if scale else (0.0 if not moved else float("inf"))
    return LogitDifference(float(difference.abs().max()), relative)


def share_arrived(bare: Tensor, reference: Tensor, other: Tensor) -> float:
    """How much of the way from ``bare`` to ``reference`` leads to ``other``: 1 the whole, 0 none of it, whatever noise
    ``other`` carries besides. All (..., vocabulary); 1 where the way has no length.

    >>> share_arrived(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, -1.0]]), torch.tensor([[0.5, -0.5]]))
    0.5
    """
    way = _centred(reference - bare)
    length = float(way.square().sum())
    return float((way * _centred(other - bare)).sum()) / length if length else 1.0


def _centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)
