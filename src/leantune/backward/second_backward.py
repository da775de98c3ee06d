"""Whether a loss may be run backward twice over one forward.

Clipping by the global norm and loss scales take two backwards. Some fused losses compute gradients in forward and scale
them in place in backward: their second backward is then wrong, and no error says so.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from leantune.backward.graph import reached_by
from leantune.errors import BackwardError

SAMPLE = 4096  # elements of a gradient that are compared
# Kernels that add in any order differ by rounding; a gradient scaled twice differs by far more.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


def check_second_backward(loss: Tensor, names: Mapping[Tensor, str]) -> bool:
    """Take the gradient of two parameters twice, and compare. The graph is kept, no ``.grad`` is set, nothing moves.

    Args:
        loss: what backward will be called on, a scalar, multiplied by the loss scale if there is one.
        names: trainable parameters in the model's order. Of those ``loss`` reaches, the smallest and the last matrix
            are looked at: few bytes, and near to the loss.

    Returns:
        whether there was something to compare: False where the gradients overflow, for a smaller loss scale will do.

    Raises:
        BackwardError: the two differ beyond rounding, or there is no second one.
    """
    reached = reached_by(loss, names)
    params = [param for param in names if param in reached]
    if not params:
        return False
    matrices = [param for param in params if param.dim() >= 2]
    probes = list(dict.fromkeys([min(reversed(params), key=Tensor.numel), *matrices[-1:]]))
    first = _samples(loss, probes)
    if not all(bool(torch.isfinite(sample).all()) for sample in first):
        return False
    try:
        second = _samples(loss, probes)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a foreign backward raises when what it saved is gone
        raise BackwardError(f"{_advice(names[probes[0]])} It failed: {type(error).__name__}: {error}") from error
    for param, once, again in zip(probes, first, second, strict=True):
        difference, size = (again - once).norm().item(), once.norm().item()
        if not difference <= _TOLERANCE[param.dtype] * size:
            raise BackwardError(f"{_advice(names[param])} The two differ by {difference:.3g}, of {size:.3g}.")
    return True


def _samples(loss: Tensor, params: list[Tensor]) -> list[Tensor]:
    """Of each gradient at most `SAMPLE` elements, spread over it, in float32."""
    flats = [grad.detach().flatten() for grad in torch.autograd.grad(loss, params, retain_graph=True)]
    return [flat[:: max(1, -(-flat.numel() // SAMPLE))].float().clone() for flat in flats]


def _advice(name: str) -> str:
    return (
        f"a second backward over one forward gives {name} another gradient than the first: the loss, or a module, "
        "changes in backward what it saved in forward (some fused linear cross-entropies scale saved gradients in "
        "place). clip='global' and a loss scale need two backwards; nothing has been updated. Use "
        "clip='per_tensor' without a loss scale, or another loss (lt.linear_cross_entropy can be run backward twice)."
    )
