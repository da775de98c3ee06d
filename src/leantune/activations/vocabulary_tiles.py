"""The arithmetic of the loss without logits: a (tokens x vocabulary) matrix that exists one tile at a time.

Logits are ``cap(logit_scale * (h W^T + b))`` with ``cap(z) = softcap * tanh(z / softcap)`` or the identity. A tile is a
range of the vocabulary for all tokens, or for a range of tokens where there are very many. Everything past the matrix
product is fp32 (fp64 for fp64 inputs).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_SMALLEST_WIDTH = 256
"""Vocabulary entries of a tile below which tokens are cut as well: narrower products waste the machine."""


@dataclass(frozen=True)
class LogitRule:
    """How logits are made of hidden states and the head, and how much of them may exist at once."""

    logit_scale: float
    softcap: float | None
    tile_bytes: int
    compute_dtype: torch.dtype
    """dtype of the matrix products (the autocast dtype under autocast)."""

    @property
    def wide_dtype(self) -> torch.dtype:
        """dtype of everything that is not a matrix product."""
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32

    def tile_shape(self, tokens: int, vocabulary: int) -> tuple[int, int]:
        """(tokens, vocabulary entries) of one tile, all of whose temporaries together take at most ``tile_bytes``
        (more only where one token by 256 entries is more).

        >>> LogitRule(1.0, None, 64 << 20, torch.bfloat16).tile_shape(512, 49152)
        (512, 21824)
        """
        per_element = self.wide_dtype.itemsize
        if self.compute_dtype != self.wide_dtype:
            per_element += self.compute_dtype.itemsize
        if self.softcap is not None:
            per_element += self.wide_dtype.itemsize
        elements = max(1, self.tile_bytes // per_element)
        width = elements // max(1, tokens)
        if width >= min(vocabulary, _SMALLEST_WIDTH):
            return max(1, tokens), min(vocabulary, max(1, width // 64 * 64))
        width = min(vocabulary, _SMALLEST_WIDTH)
        return max(1, min(tokens, elements // width)), width

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One tile of logits, (tokens, entries) in the wide dtype; ``hidden`` is in the compute dtype already."""
        weight = weight.to(self.compute_dtype)
        bias = None if bias is None else bias.to(self.compute_dtype)
        logits = torch.nn.functional.linear(hidden, weight, bias).to(self.wide_dtype)
        if self.logit_scale != 1.0:
            logits.mul_(self.logit_scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


def ranges(size: int, width: int) -> Iterator[slice]:
    """Consecutive slices of at most ``width`` that cover ``size``."""
    for start in range(0, size, width):
        yield slice(start, min(start + width, size))


def label_loss(
    rule: LogitRule, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """(sum over tokens of logsumexp - label logit, logsumexp of each token (tokens,)), both in the wide dtype.

    hidden (tokens, H) in the compute dtype, weight (V, H), bias (V,) or None, labels int64 (tokens,) within 0..V-1. The
    logsumexp is a running one: a maximum and a sum that is rescaled whenever a later tile raises the maximum.
    """
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    height, width = rule.tile_shape(tokens, vocabulary)
    logsumexp = hidden.new_empty(tokens, dtype=rule.wide_dtype)
    total = hidden.new_zeros((), dtype=rule.wide_dtype)
    for rows in ranges(tokens, height):
        hidden_rows, label_rows = hidden[rows], labels[rows]
        # The lowest finite number, not -inf: a first tile of -inf logits must not make inf - inf.
        top = hidden.new_full(label_rows.shape, torch.finfo(rule.wide_dtype).min, dtype=rule.wide_dtype)
        exponentials = torch.zeros_like(top)
        label_logits = torch.zeros_like(top)
        for entries in ranges(vocabulary, width):
            logits = rule.logits(hidden_rows, weight[entries], None if bias is None else bias[entries])
            inside, column = _label_columns(label_rows, entries)
            found = logits.gather(1, column.unsqueeze(1)).squeeze(1)
            label_logits = torch.where(inside, found, label_logits)
            new_top = torch.maximum(top, logits.amax(dim=1))
            tile_sum = logits.sub_(new_top.unsqueeze(1)).exp_().sum(dim=1)
            exponentials = exponentials * (top - new_top).exp() + tile_sum
            top = new_top
            del logits
        logsumexp[rows] = top + exponentials.log()
        total = total + (logsumexp[rows] - label_logits).sum()
    return total, logsumexp


class HeadGradient:
    """Where the head's gradient goes, one range of the vocabulary after another, each range once.

    `destination` hands out the (entries, H) and (entries,) views that a range's gradient is written to, `finish` is
    called when that range is complete and its weights are no longer read: an update per tile can be put there.
    """

    def __init__(self, weight: Tensor | None, bias: Tensor | None) -> None:
        """weight (V, H), bias (V,): what a gradient is wanted for, or None. Allocates one buffer of each's dtype."""
        self.weight = None if weight is None else torch.empty_like(weight, memory_format=torch.contiguous_format)
        self.bias = None if bias is None else torch.empty_like(bias)

    def destination(self, entries: slice) -> tuple[Tensor | None, Tensor | None]:
        """The views of (weight gradient, bias gradient) that belong to a range of the vocabulary."""
        weight = None if self.weight is None else self.weight[entries]
        return weight, None if self.bias is None else self.bias[entries]

    def finish(self, entries: slice) -> None:
        """A range of the vocabulary is complete. Here, nothing more is to be done with it."""


def label_loss_backward(
    rule: LogitRule,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    logsumexp: Tensor,
    coefficient: Tensor,
    head: HeadGradient,
    hidden_gradient: Tensor | None,
) -> None:
    """Gradients of ``coefficient * label_loss``: into ``head`` by range, and added to ``hidden_gradient``.

    ``hidden_gradient`` is (tokens, H) zeros in the wide dtype, or None: every range adds a term to it, so a narrow one
    would be rounded as often. A range's weight gradient is a single matrix product (rounded once); where tokens are cut
    too it is summed in the wide dtype for that range only.
    """
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    height, width = rule.tile_shape(tokens, vocabulary)
    for entries in ranges(vocabulary, width):
        weight_tile = weight[entries]
        bias_tile = None if bias is None else bias[entries]
        weight_target, bias_target = head.destination(entries)
        one_chunk = height >= tokens
        weight_sum = bias_sum = None
        if weight_target is not None and not one_chunk:
            weight_sum = torch.zeros_like(weight_target, dtype=rule.wide_dtype)
        if bias_target is not None:
            bias_sum = torch.zeros_like(bias_target, dtype=rule.wide_dtype)
        for rows in ranges(tokens, height):
            slope = _logit_gradient(
                rule, hidden[rows], weight_tile, bias_tile, labels[rows], logsumexp[rows], coefficient, entries
            )
            if bias_sum is not None:
                bias_sum += slope.sum(dim=0)
            slope = slope.to(rule.compute_dtype)
            if hidden_gradient is not None:
                hidden_gradient[rows] += slope @ weight_tile.to(rule.compute_dtype)
            if weight_sum is not None:
                weight_sum += slope.t() @ hidden[rows]
            elif weight_target is not None and weight_target.dtype == rule.compute_dtype:
                torch.mm(slope.t(), hidden[rows], out=weight_target)
            elif weight_target is not None:
                weight_target.copy_(slope.t() @ hidden[rows])
            del slope
        if weight_target is not None and weight_sum is not None:
            weight_target.copy_(weight_sum)
        if bias_target is not None and bias_sum is not None:
            bias_target.copy_(bias_sum)
        head.finish(entries)


def _logit_gradient(
    rule: LogitRule,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    logsumexp: Tensor,
    coefficient: Tensor,
    entries: slice,
) -> Tensor:
    """coefficient * (softmax - onehot) of one tile, carried back through cap and scale; wide dtype."""
    logits = rule.logits(hidden, weight, bias)
    cap_slope = None
    if rule.softcap is not None:
        # d cap(z) / dz = 1 - tanh^2 = 1 - (cap(z) / softcap)^2
        cap_slope = (logits / rule.softcap).square_().neg_().add_(1.0)
    slope = logits.sub_(logsumexp.unsqueeze(1)).exp_()
    inside, column = _label_columns(labels, entries)
    slope.scatter_add_(1, column.unsqueeze(1), -inside.to(slope.dtype).unsqueeze(1))
    slope.mul_(coefficient * rule.logit_scale)
    return slope if cap_slope is None else slope.mul_(cap_slope)


def _label_columns(labels: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
    """(whether each label falls in the range, its column there; a valid column also where it does not)."""
    column = labels - entries.start
    width = entries.stop - entries.start
    return (column >= 0) & (column < width), column.clamp(0, width - 1)
