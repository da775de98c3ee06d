"""Random bits from a counter: a hash of where an element is and which step it is, instead of a generator's state.

key = splitmix64 of (seed, step, position of the parameter in the optimizer's groups, global row, block);
word j of the block = mix32(key ^ j * 0x9E3779B9), which serves two elements: of each sixteen neighbours, number i and
i + 8, i < 8, share a word, and the second sees its halves exchanged. The low half rounds the state and the high one
the weight, so no two roundings of an element, and no two of a kind, share bits. Nothing has to be saved to resume bit
for bit, replicas draw the same bits, and a shard draws the bits of its global rows.
"""

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN32 = 0x9E3779B9
_GOLDEN64 = 0x9E3779B97F4A7C15


def splitmix64(value: int) -> int:
    """One round of splitmix64 (Steele, Lea, Flood 2014) on a Python integer, modulo 2^64.

    >>> hex(splitmix64(0))
    '0xe220a8397b1dcdaf'
    """
    value = (value + _GOLDEN64) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def stream_key(seed: int, step: int, position: int) -> int:
    """The 64-bit key of one parameter in one step."""
    return splitmix64(splitmix64(splitmix64(seed & _MASK64) ^ step) ^ position)


def random_bits(
    key: int, first_row: int, rows: int, first_block: int, blocks: int, size: int, device: torch.device
) -> Tensor:
    """int32 (rows, blocks, size) of uniform bits for the elements of these blocks of these global rows."""
    row = torch.arange(first_row, first_row + rows, dtype=torch.int64, device=device).unsqueeze(1)
    block = torch.arange(first_block, first_block + blocks, dtype=torch.int64, device=device).unsqueeze(0)
    keys = _splitmix64(_splitmix64(row ^ _signed64(key)) ^ block)
    pairs = -(-size // 16)
    index = torch.arange(8 * pairs, dtype=torch.int64, device=device) * _GOLDEN32
    words = _mix32_(keys.to(torch.int32).unsqueeze(2) ^ index.to(torch.int32)).view(rows, blocks, pairs, 8)
    both = torch.stack([words, _exchanged(words)], dim=3).view(rows, blocks, 16 * pairs)
    return both if size == 16 * pairs else both[..., :size].contiguous()


def bits_at(key: int, rows: Tensor, columns: Tensor, size: int) -> Tensor:
    """int32 bits of single elements: what :func:`random_bits` draws at these global ``rows`` and ``columns``.

    ``rows``, ``columns``: int64, of one shape. ``size``: elements of a block.

    >>> whole = random_bits(7, 0, 3, 0, 2, 4, torch.device("cpu")).view(3, 8)
    >>> bool(bits_at(7, torch.tensor([2, 1]), torch.tensor([0, 6]), 4).eq(whole[[2, 1], [0, 6]]).all())
    True
    """
    block = torch.div(columns, size, rounding_mode="floor")
    keys = _splitmix64(_splitmix64(rows ^ _signed64(key)) ^ block)
    element = columns - block * size
    index = (torch.div(element, 16, rounding_mode="floor") * 8 + element % 8) * _GOLDEN32
    words = _mix32_(keys.to(torch.int32) ^ index.to(torch.int32))
    return torch.where(element % 16 < 8, words, _exchanged(words))


def low_fraction(bits: Tensor) -> Tensor:
    """The low 16 bits as fp32 in [0, 1), a multiple of 2^-16."""
    return bits.bitwise_and(0xFFFF).float().mul_(2.0**-16)


def high_half(bits: Tensor) -> Tensor:
    """The high 16 bits as int32 in [0, 65536)."""
    return bits.bitwise_right_shift(16).bitwise_and_(0xFFFF)


def _signed64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _splitmix64(value: Tensor) -> Tensor:
    """:func:`splitmix64` on int64 tensors (two's complement products wrap; shifts are made logical by masking)."""
    value = value + _signed64(_GOLDEN64)
    value = (value ^ _shift64(value, 30)) * _signed64(0xBF58476D1CE4E5B9)
    value = (value ^ _shift64(value, 27)) * _signed64(0x94D049BB133111EB)
    return value ^ _shift64(value, 31)


def _shift64(value: Tensor, by: int) -> Tensor:
    return (value >> by) & ((1 << (64 - by)) - 1)


def _exchanged(words: Tensor) -> Tensor:
    """Low and high half change places."""
    return words.bitwise_left_shift(16).bitwise_or_(high_half(words))


def _mix32_(bits: Tensor) -> Tensor:
    """An in-place 32-bit finaliser: every input bit reaches every output bit (constants: Wellons, lowbias32)."""
    _xor_shift_(bits, 16).mul_(0x7FEB352D)
    _xor_shift_(bits, 15).mul_(0x846CA68B - (1 << 32))
    return _xor_shift_(bits, 16)


def _xor_shift_(bits: Tensor, by: int) -> Tensor:
    """x ^ (x >> by) with a logical shift: int32's own would copy the sign down and cancel the highest bit."""
    return bits.bitwise_xor_(bits.bitwise_right_shift(by).bitwise_and_((1 << (32 - by)) - 1))
