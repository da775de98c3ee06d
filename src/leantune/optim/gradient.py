"""Reading a gradient a chunk at a time: its norm, with bounded temporaries whatever its size."""

import torch
from torch import Tensor

from leantune.kernels import native
from leantune.optim.row_shard import is_sharded, local, row_shard

_CHUNK = 1 << 20


def squared_norm(grad: Tensor) -> Tensor:
    """Sum of squares in fp32, a tensor of no dimensions; NaN or Inf where an element is (4 MiB of temporaries at most).

    The chunks are added in order, so equal gradients give equal bits wherever the norm is taken.
    """
    in_kernel = native.squared_norms([grad])[0]
    if in_kernel is not None:
        return torch.tensor(in_kernel, dtype=torch.float32, device="cpu")
    if grad.numel() <= _CHUNK:
        return _chunk_norm(grad)
    if not grad.is_contiguous():
        rows = max(1, _CHUNK // (grad.numel() // grad.shape[0]))
        parts = [squared_norm(grad[top : top + rows].contiguous()) for top in range(0, grad.shape[0], rows)]
    else:
        parts = [_chunk_norm(chunk) for chunk in grad.view(-1).split(_CHUNK)]
    return torch.stack(parts).sum()


def whole_squared_norm(param: Tensor, grad: Tensor) -> float:
    """:func:`squared_norm` of a parameter's whole gradient, wherever its rows lie: the same on every process."""
    if is_sharded(param):
        return float(row_shard(param).total(squared_norm(local(grad))).item())
    in_kernel = native.squared_norms([grad])[0]
    return squared_norm(grad).item() if in_kernel is None else in_kernel


def _chunk_norm(chunk: Tensor) -> Tensor:
    if chunk.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=chunk.device)
    return torch.linalg.vector_norm(chunk.float()).square()
