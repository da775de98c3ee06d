"""Five trits in a byte: the storage format of every ternary state.

A row of ``cols`` trits is cut into groups of five blocks. A group of n trits takes p = ceil(n / 5) bytes, and byte i of
the group holds the trits i, i + p, i + 2p, i + 3p, i + 4p as digits of base 3 (3^5 = 243). A full group has n = 5 *
block and p = block, so its digit k is exactly block k; only the last group of a row can be partial. Rows never share a
byte.
"""

import torch
from torch import Tensor

TRITS_PER_BYTE = 5


def packed_bytes(cols: int, block_size: int) -> int:
    """Bytes that one row of ``cols`` trits takes.

    >>> packed_bytes(4096, 128), packed_bytes(576, 128), packed_bytes(3, 128)
    (820, 116, 1)
    """
    full, rest = divmod(cols, TRITS_PER_BYTE * block_size)
    return full * block_size + -(-rest // TRITS_PER_BYTE)


def pack_trits(trits: Tensor, block_size: int) -> Tensor:
    """Pack trits, a (rows, cols) tensor of -1, 0, +1 of any dtype, into uint8 (rows, packed_bytes(cols)).

    >>> t = torch.tensor([[1, 0, -1, -1, 1, 1, 0]])
    >>> bool((unpack_trits(pack_trits(t, 128), 7, 128) == t).all())
    True
    """
    rows, cols = trits.shape
    group = TRITS_PER_BYTE * block_size
    full = cols // group * group
    parts = []
    if full:
        parts.append(_to_bytes(trits[:, :full].reshape(rows, full // group, TRITS_PER_BYTE, block_size)).flatten(1))
    if cols > full:
        planes = -(-(cols - full) // TRITS_PER_BYTE)
        # Absent trits of the last group are stored as digit 0, i.e. -1, so equal states are equal bytes.
        padded = torch.nn.functional.pad(trits[:, full:], (0, planes * TRITS_PER_BYTE - (cols - full)), value=-1)
        parts.append(_to_bytes(padded.reshape(rows, TRITS_PER_BYTE, planes)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def unpack_trits(packed: Tensor, cols: int, block_size: int) -> Tensor:
    """The inverse of :func:`pack_trits`: fp32 (rows, cols) of -1, 0, +1."""
    rows = packed.shape[0]
    group = TRITS_PER_BYTE * block_size
    full = cols // group * group
    if full == cols:
        return _to_trits(packed.view(rows, full // group, block_size)).view(rows, cols)
    trits = packed.new_empty((rows, cols), dtype=torch.float32)
    split = full // TRITS_PER_BYTE
    if full:
        trits[:, :full] = _to_trits(packed[:, :split].reshape(rows, full // group, block_size)).view(rows, full)
    trits[:, full:] = _to_trits(packed[:, split:]).view(rows, -1)[:, : cols - full]
    return trits


def _to_bytes(planes: Tensor) -> Tensor:
    """Digits (..., 5, p) of -1, 0, +1 into bytes (..., p): sum of (digit + 1) 3^k."""
    weights = torch.tensor([1.0, 3.0, 9.0, 27.0, 81.0], device=planes.device).unsqueeze(-1)
    return (planes * weights).sum(dim=-2).add_(121.0).to(torch.uint8)


def _to_trits(packed: Tensor) -> Tensor:
    """Bytes (..., p) into fp32 digits (..., 5, p) of -1, 0, +1.

    Digit k is floor(b / 3^k) - 3 floor(b / 3^(k+1)), less 1; half a unit added first keeps fp32 quotients off the
    integers.
    """
    powers = torch.tensor([1.0, 1 / 3, 1 / 9, 1 / 27, 1 / 81], device=packed.device).unsqueeze(-1)
    quotients = packed.unsqueeze(-2).float().add_(0.5).mul(powers).floor_()
    quotients[..., :-1, :] -= 3.0 * quotients[..., 1:, :]
    return quotients.sub_(1.0)
