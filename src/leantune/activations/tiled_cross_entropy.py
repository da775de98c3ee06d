"""The autograd function of the logits-free cross-entropy: a walk over tiles forward, and one backward.

The gradient of the head's weight is the largest of a model. Autograd gets it whole; or a taker, whom someone has put
into the graph's node for this backward (`TiledCrossEntropy`), gets it a tile of vocabulary rows at a time, in as many
walks as it needs, and it never exists whole.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.amp import is_autocast_available
from torch.autograd.function import once_differentiable

from leantune.activations.logit_tiles import LogitTiles
from leantune.activations.tile_plan import ROUNDED_TOGETHER
from leantune.errors import BackwardError


class TiledCrossEntropy(torch.autograd.Function):
    """The sum of the losses of all tokens that count, wide.

    Arguments, all checked before: hidden (rows, H); weight (V, H); bias (V,) or None; labels int64 (tokens,), all in
    [0, V); index int64 (tokens,), their rows of hidden, or None for all; scale and softcap of the logits; the dtype
    operands are rounded to; bytes of a tile. Kept: the tensors given and one logsumexp a token. Nothing kept is
    changed.

    The node in the graph has two attributes. ``head``: the weight, where it is a leaf that wants a gradient, else
    None. ``taker``: None, or who is called with a walk (`leantune.optim.gradient.Walk`: each call gives the gradient of
    ``head`` anew, in tiles of its rows, fp32 numbers that ``head``'s dtype holds) instead of autograd getting that
    gradient. It must go through one walk to its end at least. It may write the rows of ``head`` that a walk has given,
    if it will not walk again.
    """

    walking = False
    """Whether a forward is under way: what is allocated meanwhile is the loss's own."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        index: Tensor | None,
        scale: float,
        softcap: float | None,
        operand_dtype: torch.dtype,
        tile_bytes: int,
    ) -> Tensor:
        ctx.scale, ctx.softcap, ctx.operand_dtype, ctx.tile_bytes = scale, softcap, operand_dtype, tile_bytes
        ctx.head, ctx.taker = weight if ctx.needs_input_grad[1] and weight.is_leaf else None, None
        TiledCrossEntropy.walking = True
        try:
            with _without_autocast(hidden.device):
                tiles = LogitTiles(
                    hidden, index, weight, bias, scale=scale, operand_dtype=operand_dtype, tile_bytes=tile_bytes
                )
                logsumexp, picked = _logsumexp(tiles, labels, softcap)
                ctx.save_for_backward(hidden, index, weight, bias, labels, logsumexp)
                return (logsumexp - picked).sum()
        finally:
            TiledCrossEntropy.walking = False

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, index, weight, bias, labels, logsumexp = ctx.saved_tensors
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        with _without_autocast(hidden.device):
            tiles = LogitTiles(
                hidden,
                index,
                weight,
                bias,
                scale=ctx.scale,
                operand_dtype=ctx.operand_dtype,
                tile_bytes=ctx.tile_bytes,
                copies=0 if ctx.softcap is None else 1,
                # Also where the weight is wide and products can go straight into its whole gradient: with the same
                # tiles both ways of taking it have the same bits.
                gradient_room=want_weight,
                backward=True,
            )
            total = hidden.new_zeros((tiles.tokens, hidden.shape[1]), dtype=tiles.wide) if want_hidden else None
            bias_total = torch.zeros(weight.shape[0], dtype=tiles.wide, device=weight.device) if want_bias else None
            walks = _Walks(tiles, labels, logsumexp, ctx.softcap, grads[0] * ctx.scale, total, bias_total)
            head_gradient = None
            if want_weight and ctx.taker is not None:
                walks.give(ctx.taker)
            else:
                head_gradient = walks.whole(want_weight)
            del tiles, walks  # their working memory, before the gradient of the hidden states is rounded into its own
            return (
                None if total is None else _scattered(total, index, hidden),
                head_gradient,
                None if bias_total is None or bias is None else bias_total.to(bias.dtype),
                *(None,) * 6,
            )


class _Walks:
    """The walks of one backward. The first one also adds to the totals of the hidden states and of the bias."""

    def __init__(
        self,
        tiles: LogitTiles,
        labels: Tensor,
        logsumexp: Tensor,
        softcap: float | None,
        factor: Tensor,
        hidden_total: Tensor | None,
        bias_total: Tensor | None,
    ) -> None:
        self._tiles = tiles
        self._given = labels, logsumexp, softcap, factor
        self._totals = hidden_total, bias_total
        self._began = self._complete = False

    def whole(self, wanted: bool) -> Tensor | None:
        """The head's gradient in one buffer of the weight's dtype, each element rounded once; None if not ``wanted``.

        Where the weight is wide itself, products go straight into the buffer.
        """
        if not wanted:
            for _ in self._walk(lambda entries: None):
                pass
            return None
        weight = self._tiles.weight
        # torch.empty and not empty_like: a transposed weight would give rows that a product cannot be written into.
        gradient = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        if weight.dtype == self._tiles.wide:
            for _ in self._walk(lambda entries: gradient[entries]):
                pass
            return gradient
        for entries, tile in self._walk(self._scratch()):
            if tile is not None:
                gradient[entries] = tile
        return gradient

    def give(self, taker: Callable[[Callable[[], Iterator[tuple[int, Tensor]]]], None]) -> None:
        """Let ``taker`` walk over the head's gradient. Raises BackwardError where it did not walk to an end."""
        scratch = self._scratch()

        def walk() -> Iterator[tuple[int, Tensor]]:
            for entries, tile in self._walk(scratch):
                if tile is not None:
                    yield entries.start, _rounded_(tile, self._tiles.weight.dtype)

        taker(walk)
        if not self._complete:
            raise BackwardError(
                "whoever takes the head's gradient in tiles did not go through the first walk to its end, so the "
                "gradient of the hidden states is not complete."
            )

    def _walk(self, room: Callable[[slice], Tensor | None]) -> Iterator[tuple[slice, Tensor | None]]:
        """Give (vocabulary entries, dloss/dweight of them). The first walk adds dloss/dhidden and dloss/dbias to the
        totals, which are complete at its end.

        ``room`` is memory for a tile's gradient, wide (t, H), to be overwritten, or None where none is wanted. A tile
        is given only after its part of the hidden states' gradient is made, and its rows of the weight are not read
        again: they may be updated. The factor (one number, wide) is multiplied in last: the logits' gradients stay in
        [-1, 1], where 16-bit operands do not underflow.
        """
        first, self._began = not self._began, True
        hidden_total, bias_total = self._totals if first else (None, None)
        tiles, (labels, logsumexp, softcap, factor) = self._tiles, self._given
        for entries, weight, bias in tiles.vocabulary_tiles():
            tile = room(entries)
            if tile is not None and not tiles.token_slices:
                tile.zero_()
            for tokens, rows in tiles.token_tiles():
                slope = _logit_gradient(tiles, rows, weight, bias, labels[tokens], entries, logsumexp[tokens], softcap)
                if bias_total is not None:
                    bias_total[entries] += slope.sum(0)
                slope = slope.to(tiles.product_dtype)
                if hidden_total is not None:
                    tiles.add_product(hidden_total[tokens], slope, weight)
                if tile is not None:
                    tiles.add_product(tile, slope.t(), rows, fresh=tokens.start == 0)
                del slope
            if tile is not None and tiles.token_slices:
                tile.mul_(factor)
            yield entries, tile
        if tiles.token_slices:
            for total in (hidden_total, bias_total):
                if total is not None:
                    total.mul_(factor)
        self._complete = self._complete or first

    def _scratch(self) -> Callable[[slice], Tensor]:
        """Wide room for one tile (t, H) of the head's gradient, the same for all."""
        width = max((entries.stop - entries.start for entries in self._tiles.vocabulary_slices), default=0)
        weight = self._tiles.weight
        scratch = torch.empty((width, weight.shape[1]), dtype=self._tiles.wide, device=weight.device)
        return lambda entries: scratch[: entries.stop - entries.start]


def _rounded_(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """The contiguous ``tile`` with every number rounded to one that ``dtype`` holds, in place."""
    if tile.dtype != dtype:
        for part in tile.view(-1).split(ROUNDED_TOGETHER):
            part.copy_(part.to(dtype))
    return tile


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Casts are explicit here, and backward may run inside or outside of autocast. Meta tensors know none: it
    raises."""
    return torch.autocast(device.type, enabled=False) if is_autocast_available(device.type) else nullcontext()


def _logsumexp(tiles: LogitTiles, labels: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Per token, wide (N,): the log of the sum of exp(logits), and the label's logit."""
    top = tiles.hidden.new_full((tiles.tokens,), -math.inf, dtype=tiles.wide)
    total, picked = torch.zeros_like(top), torch.zeros_like(top)
    for entries, weight, bias in tiles.vocabulary_tiles():
        for tokens, rows in tiles.token_tiles():
            logits = tiles.logits(rows, weight, bias)
            if softcap is not None:
                logits.div_(softcap).tanh_().mul_(softcap)
            column, inside = _columns(labels[tokens], entries)
            picked[tokens] = torch.where(inside, logits.gather(1, column[:, None])[:, 0], picked[tokens])
            before = top[tokens]
            highest = torch.maximum(before, logits.amax(1))
            # A vocabulary may be padded with -inf biases: -inf minus -inf would be NaN.
            base = highest.masked_fill(highest == -math.inf, 0.0)
            added = logits.sub_(base[:, None]).exp_().sum(1)
            total[tokens] = total[tokens] * (before - base).exp() + added
            top[tokens] = highest
    return top + total.log(), picked


def _logit_gradient(
    tiles: LogitTiles,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    entries: slice,
    logsumexp: Tensor,
    softcap: float | None,
) -> Tensor:
    """(n, t) derivative of the summed loss by the scaled, uncapped logits, made in the memory of the logits."""
    logits = tiles.logits(rows, weight, bias)
    slope = None
    if softcap is not None:
        logits.div_(softcap).tanh_()
        slope = logits.square().neg_().add_(1.0)
        logits.mul_(softcap)
    logits.sub_(logsumexp[:, None]).exp_()
    column, inside = _columns(labels, entries)
    column = column[:, None]
    logits.scatter_(1, column, logits.gather(1, column) - inside[:, None].to(logits.dtype))
    return logits if slope is None else logits.mul_(slope)


def _columns(labels: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
    """Per token, the column of its label in a tile (some column if it is elsewhere), and whether it is in the tile."""
    inside = (labels >= entries.start) & (labels < entries.stop)
    return (labels - entries.start).clamp(0, entries.stop - entries.start - 1), inside


def _scattered(total: Tensor, index: Tensor | None, hidden: Tensor) -> Tensor:
    """The gradient of ``hidden`` in its dtype, zero in rows that do not count."""
    if index is None:
        return total.to(hidden.dtype)
    gradient = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    gradient[index] = total.to(hidden.dtype)
    return gradient
