"""The autograd function of the logits-free cross-entropy: a walk over tiles forward, and one backward."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp import is_autocast_available
from torch.autograd.function import once_differentiable

from leantune.activations.logit_tiles import LogitTiles


class HeadGradientSink(Protocol):
    """Takes the gradient of an output layer's weight, a tile of the vocabulary after the other."""

    def room(self, entries: slice) -> Tensor:
        """Wide (fp32 or float64) memory (t, H) for the tile of these vocabulary entries, to be overwritten."""

    def finished(self, entries: slice, tile: Tensor) -> None:
        """The tile that ``room`` gave is complete, and these rows of the weight are not read again in this backward."""


class WholeHeadGradient:
    """The gradient in one buffer of the weight's dtype; each element is rounded once.

    Where the weight is wide itself, products go straight into the buffer.
    """

    def __init__(self, weight: Tensor, tiles: LogitTiles) -> None:
        # torch.empty and not empty_like: a transposed weight would give rows that a product cannot be written into.
        self.gradient = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        self._wide = tiles.wide
        width = max((s.stop - s.start for s in tiles.vocabulary_slices), default=0)
        narrow = weight.dtype != tiles.wide
        self._scratch = self.gradient.new_empty((width, weight.shape[1]), dtype=tiles.wide) if narrow else None

    def room(self, entries: slice) -> Tensor:
        if self._scratch is None:
            return self.gradient[entries]
        return self._scratch[: entries.stop - entries.start]

    def finished(self, entries: slice, tile: Tensor) -> None:
        if self._scratch is not None:
            self.gradient[entries] = tile


class TiledCrossEntropy(torch.autograd.Function):
    """The sum of the losses of all tokens that count, wide.

    Arguments, all checked before: hidden (rows, H); weight (V, H); bias (V,) or None; labels int64 (tokens,), all in
    [0, V); index int64 (tokens,), their rows of hidden, or None for all; scale and softcap of the logits; the dtype
    operands are rounded to; bytes of a tile. Kept: the tensors given and one logsumexp a token. Nothing kept is
    changed.
    """

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
        with _without_autocast(hidden.device):
            tiles = LogitTiles(
                hidden, index, weight, bias, scale=scale, operand_dtype=operand_dtype, tile_bytes=tile_bytes
            )
            logsumexp, picked = _logsumexp(tiles, labels, softcap)
            ctx.save_for_backward(hidden, index, weight, bias, labels, logsumexp)
            return (logsumexp - picked).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, index, weight, bias, labels, logsumexp = ctx.saved_tensors
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        with _without_autocast(hidden.device):
            wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
            tiles = LogitTiles(
                hidden,
                index,
                weight,
                bias,
                scale=ctx.scale,
                operand_dtype=ctx.operand_dtype,
                tile_bytes=ctx.tile_bytes,
                copies=0 if ctx.softcap is None else 1,
                gradient_room=want_weight and weight.dtype != wide,
                backward=True,
            )
            sink = WholeHeadGradient(weight, tiles) if want_weight else None
            total = hidden.new_zeros((tiles.tokens, hidden.shape[1]), dtype=wide) if want_hidden else None
            bias_total = torch.zeros(weight.shape[0], dtype=wide, device=weight.device) if want_bias else None
            _gradients(tiles, labels, logsumexp, ctx.softcap, grads[0] * ctx.scale, total, sink, bias_total)
            head_gradient = None if sink is None else sink.gradient
            del tiles, sink  # their working memory, before the gradient of the hidden states is rounded into its own
            return (
                None if total is None else _scattered(total, index, hidden),
                head_gradient,
                None if bias_total is None or bias is None else bias_total.to(bias.dtype),
                *(None,) * 6,
            )


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


def _gradients(
    tiles: LogitTiles,
    labels: Tensor,
    logsumexp: Tensor,
    softcap: float | None,
    factor: Tensor,
    hidden_total: Tensor | None,
    sink: HeadGradientSink | None,
    bias_total: Tensor | None,
) -> None:
    """Add factor * dloss/dhidden to ``hidden_total``, give dloss/dweight to ``sink``, add to ``bias_total``.

    A weight tile reaches the sink only after its part of the hidden states' gradient is made, so that the sink may
    update those rows of the weight. ``factor`` (one number, wide) is multiplied in last: the logits' gradients stay in
    [-1, 1], where 16-bit operands do not underflow.
    """
    for entries, weight, bias in tiles.vocabulary_tiles():
        tile = None if sink is None else sink.room(entries)
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
        if sink is not None and tile is not None:
            if tiles.token_slices:
                tile.mul_(factor)
            sink.finished(entries, tile)
    if tiles.token_slices:
        for total in (hidden_total, bias_total):
            if total is not None:
                total.mul_(factor)


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
