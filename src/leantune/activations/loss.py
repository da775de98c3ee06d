"""Cross-entropy of a language model's output layer without its logits.

The (tokens x vocabulary) logits of a 32 k-token batch and a 128 k vocabulary take 16 GiB in fp32, and their gradient as
much again. Neither exists here. With h_i the hidden state of token i, y_i its label, W the head's weight:

    z_ij = softcap(scale * (h_i . W_j + b_j))            softcap(x) = c * tanh(x / c)
    loss = sum_i (lse_i - z_{i,y_i})                     lse_i = log sum_j exp(z_ij)
    dz_ij = exp(z_ij - lse_i) - [j = y_i]                dW_j = sum_i dz_ij z'_ij h_i        dh_i = sum_j dz_ij z'_ij
    W_j

Forward runs over tiles of the vocabulary with a running maximum and sum (the online softmax of Milakov and
Gimelshein, arXiv 1805.02867) and keeps lse_i; backward makes each tile of logits again. One matrix product more than
keeping the logits: four instead of three.
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from leantune.activations.tile_plan import TILE_BYTES
from leantune.activations.tiled_cross_entropy import TiledCrossEntropy
from leantune.errors import InvalidArgumentError, InvalidTypeError


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    num_items: int | Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    tile_bytes: int = TILE_BYTES,
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias).float(), labels)`` without ever holding the logits.

    Labels are taken as they are: for a causal language model, shift them first (`shift_labels`).

    Args:
        hidden: (..., H), bf16, fp16, fp32 or float64.
        weight: (V, H) of the same dtype (any floating dtype under autocast, which rounds operands as for ``F.linear``).
        labels: (...), integer, in [0, V) or ``ignore_index``.
        bias: (V,) or None.
        ignore_index: label of tokens that do not count. Their logits are not computed.
        reduction: "mean" over the tokens that count, or "sum".
        num_items: with "mean", the divisor instead: an int or a tensor of one element, such as the tokens of a whole
            accumulated batch (transformers' ``num_items_in_batch``).
        logit_scale: multiplies the logits, the bias included.
        softcap: c > 0: then each logit becomes c * tanh(logit / c). None: unchanged.
        tile_bytes: bytes that a tile of logits with its working copies may take.

    Returns: the loss, a scalar in fp32 (float64 for float64 hidden states). If no token counts, "sum" is 0 and so is
        "mean" over a given ``num_items``; "mean" by itself is NaN, as in ``F.cross_entropy``: the mean of nothing is
        not a small loss, and a training loop that checks its loss should stop there. The gradients are zero each time.

    Bytes: kept for backward, besides the weight: the hidden states (a copy of the rows that count, if they are at most
        half; otherwise the given tensor and 8 B per counted token) and 12 B per counted token. During forward and
        backward: ``tile_bytes``; during backward also 4 * H per counted token (fp32 sums of the gradient of
        ``hidden``), that gradient, and one buffer of the shape and dtype of ``weight``, each element of which is summed
        in fp32 and rounded once. A frozen weight has no such buffer, nor has one that `leantune.FusedBackward` updates
        in tiles.

    Nothing kept is changed by backward: ``backward(retain_graph=True)`` and a second backward give the same gradients.
    Gradients of gradients are not supported. On tensors without data (meta, fake) every token counts.

    Raises:
        InvalidArgumentError: shapes that do not fit, a label outside the vocabulary (named), mixed dtypes or devices,
            a divisor that is not positive, or ``tile_bytes`` below one logit's needs.
        InvalidTypeError: labels that are not integers, hidden states that are not floating, sharded or quantised
        weights.

    >>> hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    >>> weight = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], requires_grad=True)
    >>> loss = linear_cross_entropy(hidden, weight, torch.tensor([2, -100]))
    >>> loss.backward()
    >>> round(loss.item(), 4), hidden.grad[1].tolist()
    (0.1429, [0.0, 0.0])
    """
    operand_dtype = _operand_dtype(hidden)
    _check_shapes(hidden, weight, labels, bias)
    _check_dtypes(hidden, weight, labels, bias)
    _check_options(reduction, logit_scale, softcap, tile_bytes)
    divisor = _checked_divisor(num_items, reduction, hidden)
    rows = hidden.reshape(-1, hidden.shape[-1])
    kept_labels, index = _counted(labels.reshape(-1), ignore_index, weight.shape[0])
    if index is not None and 2 * index.numel() <= rows.shape[0]:
        # At most half count: a copy of those rows is kept and the rest can be freed. Otherwise the tensor itself is
        # kept, which costs nothing where the caller holds it anyway. Either way at most half of it more than the best
        # choice.
        rows, index = rows.index_select(0, index), None
    # Rounded before it is kept; the weight, which is larger and kept anyway, is rounded a tile at a time.
    rows = rows.to(operand_dtype)
    loss: Tensor = TiledCrossEntropy.apply(
        rows, weight, bias, kept_labels, index, logit_scale, softcap, operand_dtype, tile_bytes
    )
    if reduction == "sum":
        return loss
    return loss / (kept_labels.numel() if divisor is None else divisor)


def shift_labels(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Labels for a causal language model: position t is scored against token t + 1, the last one not at all.

    Args:
        labels: (..., T) integers, aligned with the tokens. Not changed.
        ignore_index: put in the last place of every row.

    Returns: a new tensor (..., T). Rows of packed sequences need ``ignore_index`` at each sequence's first token.

    >>> shift_labels(torch.tensor([[5, 6, 7]])).tolist()
    [[6, 7, -100]]
    """
    if labels.dim() == 0:
        raise InvalidArgumentError("labels have no dimension to shift along: pass (..., T), one label a token")
    shifted = torch.full_like(labels, ignore_index)
    shifted[..., :-1] = labels[..., 1:]
    return shifted


def _counted(labels: Tensor, ignore_index: int, vocabulary: int) -> tuple[Tensor, Tensor | None]:
    """(int64 labels of the tokens that count, their rows; None for all). Tensors without data: all of them."""
    labels = labels.detach()
    if _without_data(labels):
        return labels.long(), None
    counted = labels != ignore_index
    index = None if bool(counted.all()) else counted.nonzero()[:, 0]
    labels = labels.long() if index is None else labels.index_select(0, index).long()
    wrong = ((labels < 0) | (labels >= vocabulary)).nonzero()
    if wrong.numel():
        first = int(wrong[0, 0])
        row = first if index is None else int(index[first])
        raise InvalidArgumentError(
            f"label {int(labels[first])} at token {row} is outside the vocabulary of {vocabulary} entries (0 to "
            f"{vocabulary - 1}), and it is not ignore_index ({ignore_index}); {wrong.shape[0]} labels are. Use the "
            "tokenizer that belongs to the model, or resize its embeddings, or mark such tokens with ignore_index"
        )
    return labels, index


def _operand_dtype(hidden: Tensor) -> torch.dtype:
    """What ``F.linear`` would multiply: the hidden states' dtype, or autocast's, which leaves float64 alone."""
    if not hidden.is_floating_point():
        raise InvalidTypeError(f"hidden states are {hidden.dtype}: pass bf16, fp16, fp32 or float64")
    if hidden.dtype != torch.float64 and _autocast(hidden):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype


def _autocast(hidden: Tensor) -> bool:
    return hidden.device.type != "meta" and torch.is_autocast_enabled(hidden.device.type)


def _check_shapes(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise InvalidArgumentError(
            f"hidden states {tuple(hidden.shape)} do not fit a weight of {tuple(weight.shape)}: they must be (..., H) "
            "and (vocabulary, H); pass nn.Linear's weight as it is, not transposed"
        )
    if labels.shape != hidden.shape[:-1]:
        raise InvalidArgumentError(
            f"labels {tuple(labels.shape)} do not fit hidden states {tuple(hidden.shape)}: one label a token is "
            f"needed, {tuple(hidden.shape[:-1])}; shift_labels(labels) keeps the length"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidArgumentError(f"bias {tuple(bias.shape)} does not fit a weight of {tuple(weight.shape)}")


def _check_dtypes(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> None:
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InvalidTypeError(
            f"labels are {labels.dtype}: pass token ids as integers (class probabilities do not work)"
        )
    if labels.device != hidden.device:
        raise InvalidArgumentError(f"hidden states are on {hidden.device}, the labels on {labels.device}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if is_traceable_wrapper_subclass(tensor) or not tensor.is_floating_point():
            raise InvalidTypeError(
                f"the {name} is a {type(tensor).__name__} of {tensor.dtype}: tiles need an ordinary floating tensor; "
                "gather a sharded one (full_tensor(), or inside the module's forward) or dequantise it first"
            )
        if tensor.device != hidden.device:
            raise InvalidArgumentError(f"hidden states are on {hidden.device}, the {name} on {tensor.device}")
        mixed = tensor.dtype != hidden.dtype
        if mixed and (not _autocast(hidden) or torch.float64 in (tensor.dtype, hidden.dtype)):
            raise InvalidArgumentError(
                f"hidden states are {hidden.dtype}, the {name} {tensor.dtype}: bring them to one dtype "
                "(hidden.to(weight.dtype)), or run under torch.autocast"
            )


def _check_options(reduction: str, logit_scale: float, softcap: float | None, tile_bytes: int) -> None:
    if reduction not in ("mean", "sum"):
        raise InvalidArgumentError(
            f'reduction={reduction!r}: pass "mean" or "sum"; losses of single tokens are not kept'
        )
    if not math.isfinite(logit_scale):
        raise InvalidArgumentError(f"logit_scale={logit_scale}: pass a finite factor, 1.0 for none")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise InvalidArgumentError(f"softcap={softcap}: pass a finite cap above 0, or None for none")
    if tile_bytes <= 0:
        raise InvalidArgumentError(f"tile_bytes={tile_bytes}: pass a number of bytes, such as {TILE_BYTES}")


def _checked_divisor(num_items: int | Tensor | None, reduction: str, hidden: Tensor) -> float | Tensor | None:
    """``num_items`` as something a loss on the device of ``hidden`` can be divided by."""
    if num_items is None:
        return None
    if reduction == "sum":
        raise InvalidArgumentError(
            'num_items divides the loss, reduction="sum" asks for none: pass reduction="mean" to divide by num_items'
        )
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise InvalidArgumentError(f"num_items has the shape {tuple(num_items.shape)}: pass its sum, one number")
        divisor = num_items.detach().reshape(())
        if _without_data(divisor):
            return divisor.to(hidden.device)
        number = float(divisor.item())
    else:
        number = float(num_items)
    if not (math.isfinite(number) and number > 0):
        raise InvalidArgumentError(
            f"num_items={number:g}: the loss is divided by it. It counts the tokens that are scored in the whole "
            "accumulated batch; a batch without any must be skipped"
        )
    return number


def _without_data(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)
