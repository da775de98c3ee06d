"""Cross-entropy of a language model's head without ever holding its logits.

A model of 128 k vocabulary makes 0.5 MB of fp32 logits a token, and their gradient as much again. Here forward keeps the
hidden states, one number a token and nothing of the vocabulary's size; backward recomputes the logits a tile at a time
(methods: exact savings; the running logsumexp is that of Milakov and Gimelshein, arXiv 1805.02867). Nothing saved is
ever written to, so a second backward over the same forward is right.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from leantune.activations.vocabulary_tiles import HeadGradient, LogitRule, label_loss, label_loss_backward
from leantune.errors import InvalidArgumentError, InvalidTypeError

DEFAULT_TILE_BYTES = 64 << 20


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    num_items: Tensor | int | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    tile_bytes: int = DEFAULT_TILE_BYTES,
) -> Tensor:
    """``cross_entropy(cap(logit_scale * (hidden @ weight.T + bias)), labels)``, the logits never materialised.

    Labels are taken as they are: for next-token prediction pass ``shift_labels(labels)``.

    Args:
        hidden: (..., H) floating point, what the head is applied to.
        weight: (V, H), the head; an embedding it is tied to is fine.
        labels: (...) int64 or int32, ids in 0..V-1 or ``ignore_index``.
        bias: (V,) or None.
        ignore_index: label of tokens without a loss; they are dropped first, none of their logits is computed.
        reduction: "mean" over the tokens that have a label, or "sum".
        num_items: divides the sum instead of the token count (an int or a tensor of one number, e.g. transformers'
            ``num_items_in_batch``, the label count of all micro-batches of a step).
        logit_scale: multiplies the logits, before the cap.
        softcap: ``softcap * tanh(logits / softcap)`` (Gemma), or None.
        tile_bytes: most bytes that the temporaries of one tile of logits may take together.

    Returns:
        The loss, a scalar in fp32 (fp64 for fp64 inputs). With every label ignored it is 0 with zero gradients for "sum"
        or with ``num_items``; a mean over no tokens does not exist and is an error.

    Bytes: forward keeps the labelled rows of ``hidden`` (in the autocast dtype under autocast; the tensor itself, no copy,
        where every row has a label), their labels and 4 bytes a token, and the row numbers (8 a token) where some were
        dropped. Backward allocates the gradient of the head in its own dtype (none where it is frozen), an fp32
        (tokens, H) sum, and ``tile_bytes``.

    Raises:
        InvalidArgumentError: shapes do not fit, a label is out of range, nothing has a label under a mean, an option has
            no meaning.
        InvalidTypeError: dtypes or devices do not fit.

    On tensors without data (meta, fake) every row counts as labelled and no label is checked: an upper bound for planning.

    >>> hidden, weight = torch.randn(3, 8), torch.randn(20, 8, requires_grad=True)
    >>> loss = linear_cross_entropy(hidden, weight, torch.tensor([4, -100, 19]))
    >>> plain = torch.nn.functional.cross_entropy(hidden @ weight.T, torch.tensor([4, -100, 19]))
    >>> bool(torch.isclose(loss, plain))
    True
    """
    _check_options(reduction, num_items, logit_scale, softcap, tile_bytes)
    _check_tensors(hidden, weight, labels, bias)
    compute_dtype = _compute_dtype(hidden)
    if compute_dtype == hidden.dtype and weight.dtype != hidden.dtype:
        raise InvalidTypeError(
            f"linear_cross_entropy: hidden is {hidden.dtype} but weight is {weight.dtype}; "
            "cast one of them, or run under torch.autocast"
        )
    rule = LogitRule(float(logit_scale), softcap, int(tile_bytes), compute_dtype)
    flat_labels = labels.reshape(-1).to(torch.int64)
    rows = _labelled_rows(flat_labels, ignore_index)
    selected = flat_labels if rows is None else flat_labels[rows]
    tokens = selected.shape[0]
    _check_labels(selected, weight.shape[0], ignore_index)
    if tokens == 0 and reduction == "mean" and num_items is None:
        raise InvalidArgumentError(
            f"linear_cross_entropy: all {flat_labels.numel()} labels are ignored ({ignore_index}), so there is no mean. "
            "The answers were probably cut off by the maximum length; drop such rows, raise the length, or pass num_items "
            "(the label count of the whole step) if other micro-batches do have labels"
        )
    divisor: Tensor | int = 1
    if num_items is not None:
        divisor = num_items.detach().to(hidden.device, rule.wide_dtype) if isinstance(num_items, Tensor) else num_items
    elif reduction == "mean":
        divisor = tokens
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, selected, rows, divisor, rule)
    return loss


def shift_labels(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Labels for next-token prediction: position i gets the label of i + 1, the last one ``ignore_index``.

    labels (..., tokens) integer; returns a new tensor of the same shape and dtype. Position i of the model's hidden
    states is then scored against position i of the result, and no slice of the hidden states is needed.

    >>> shift_labels(torch.tensor([[5, 6, 7]])).tolist()
    [[6, 7, -100]]
    """
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)


class _LinearCrossEntropy(torch.autograd.Function):
    """Keeps (hidden rows, weight, bias, labels, logsumexp); recomputes logits by tile in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        rows: Tensor | None,
        divisor: Tensor | int,
        rule: LogitRule,
    ) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        picked = (flat if rows is None else flat.index_select(0, rows)).to(rule.compute_dtype)
        with _no_autocast(hidden):
            total, logsumexp = label_loss(rule, picked, weight, bias, labels)
        scale = divisor if isinstance(divisor, Tensor) else None
        ctx.save_for_backward(picked, weight, bias, labels, rows, logsumexp, scale)
        ctx.divisor, ctx.rule = (None if scale is not None else divisor), rule
        ctx.hidden_shape, ctx.hidden_dtype = hidden.shape, hidden.dtype
        return total / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, rows, logsumexp, scale = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        rule: LogitRule = ctx.rule
        with _no_autocast(hidden):
            coefficient = gradient.to(rule.wide_dtype) / (scale if ctx.divisor is None else ctx.divisor)
            head = HeadGradient(weight if wants_weight else None, bias if wants_bias else None)
            hidden_sum = torch.zeros_like(hidden, dtype=rule.wide_dtype) if wants_hidden else None
            if wants_hidden or wants_weight or wants_bias:
                label_loss_backward(rule, hidden, weight, bias, labels, logsumexp, coefficient, head, hidden_sum)
            hidden_gradient = None
            if hidden_sum is not None:
                hidden_gradient = _spread(hidden_sum.to(ctx.hidden_dtype), rows, ctx.hidden_shape)
        return hidden_gradient, head.weight, head.bias, None, None, None, None


def _spread(gradient: Tensor, rows: Tensor | None, shape: torch.Size) -> Tensor:
    """(labelled rows, H) back to the shape of ``hidden``; rows without a label get exact zeros."""
    if rows is None:
        return gradient.view(shape)
    whole = gradient.new_zeros((shape[:-1].numel(), shape[-1]))
    whole[rows] = gradient
    return whole.view(shape)


def has_data(tensor: Tensor) -> bool:
    """False for meta and fake tensors: shapes only, nothing to look at."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _labelled_rows(labels: Tensor, ignore_index: int) -> Tensor | None:
    """int64 numbers of the rows that have a label; None where all have (or where that cannot be known)."""
    if not has_data(labels):
        return None
    rows = (labels != ignore_index).nonzero().squeeze(1)
    return None if rows.shape[0] == labels.shape[0] else rows


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype a linear layer computes in: autocast's, except for fp64, which autocast leaves alone."""
    device = hidden.device.type
    if hidden.dtype == torch.float64 or not torch.amp.is_autocast_available(device):
        return hidden.dtype
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _no_autocast(tensor: Tensor) -> Any:
    """All casts are explicit here; backward may run inside or outside the forward's autocast and must not change."""
    device = tensor.device.type
    available = torch.amp.is_autocast_available(device)
    return torch.autocast(device if available else "cpu", enabled=False)


def _check_options(
    reduction: str, num_items: Tensor | int | None, logit_scale: float, softcap: float | None, tile_bytes: int
) -> None:
    if reduction not in ("mean", "sum"):
        raise InvalidArgumentError(
            f'linear_cross_entropy: reduction={reduction!r} is not known; write "mean" or "sum" (a loss per token is not kept)'
        )
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise InvalidArgumentError(
                f"linear_cross_entropy: num_items must be one number, got a tensor of shape {tuple(num_items.shape)}"
            )
    elif num_items is not None and not num_items > 0:
        raise InvalidArgumentError(f"linear_cross_entropy: num_items must be positive, got {num_items}")
    if not math.isfinite(logit_scale):
        raise InvalidArgumentError(f"linear_cross_entropy: logit_scale must be finite, got {logit_scale}")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise InvalidArgumentError(
            f"linear_cross_entropy: softcap must be positive, got {softcap}; write None for no cap"
        )
    if tile_bytes < 1:
        raise InvalidArgumentError(f"linear_cross_entropy: tile_bytes must be positive, got {tile_bytes}")


def _check_tensors(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    if not hidden.is_floating_point() or not weight.is_floating_point():
        raise InvalidTypeError(
            f"linear_cross_entropy: hidden and weight must be floating point, got {hidden.dtype} and {weight.dtype}"
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise InvalidTypeError(f"linear_cross_entropy: labels must be int64 or int32 token ids, got {labels.dtype}")
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise InvalidArgumentError(
            f"linear_cross_entropy: hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit; "
            "expected (..., H) and (V, H)"
        )
    if labels.shape != hidden.shape[:-1]:
        raise InvalidArgumentError(
            f"linear_cross_entropy: labels {tuple(labels.shape)} must have the shape of hidden {tuple(hidden.shape)} "
            "without its last dimension (use shift_labels rather than slicing)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidArgumentError(
            f"linear_cross_entropy: bias {tuple(bias.shape)} must be ({weight.shape[0]},), one number a vocabulary entry"
        )
    if not hidden.device == weight.device == labels.device:
        raise InvalidTypeError(
            f"linear_cross_entropy: hidden is on {hidden.device}, weight on {weight.device}, labels on {labels.device}; "
            "move them to one device"
        )


def _check_labels(labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    if labels.numel() == 0 or not has_data(labels):
        return
    low, high = (int(bound) for bound in torch.stack(torch.aminmax(labels)).tolist())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise InvalidArgumentError(
            f"linear_cross_entropy: label {wrong} is outside the vocabulary of {vocabulary} entries (0..{vocabulary - 1}) "
            f"and is not ignore_index ({ignore_index}). The tokenizer may be larger than the head: "
            "model.resize_token_embeddings(len(tokenizer))"
        )
