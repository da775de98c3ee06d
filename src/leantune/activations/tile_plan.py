"""What a tile of logits is made of, in bytes, and how large it may be: plain numbers, for the loss and its plans."""

from dataclasses import dataclass

from leantune.errors import InvalidArgumentError

TILE_BYTES = 64 << 20
"""Bytes of one tile of logits with its working copies."""
ROUNDED_TOGETHER = 1 << 18
"""Elements of a head's gradient that are rounded at once."""
NARROW = 256
"""Vocabulary entries below which a tile is too narrow for a fast matrix product: tokens are tiled as well."""
ALIGNED = 64
"""Widths above this are rounded down to a multiple of it."""


@dataclass(frozen=True)
class TileCost:
    """Bytes that a tile of n tokens x t vocabulary entries takes: n * t * cell + t * column + n * row."""

    cell: int
    """Per logit: the logit itself and its working copies."""
    column: int
    """Per vocabulary entry: its widened weights and the gradient of them before rounding."""
    row: int
    """Per token: its gathered or widened hidden states."""

    def of(self, tokens: int, width: int) -> int:
        return tokens * width * self.cell + width * self.column + tokens * self.row


def plan_tiles(tokens: int, vocabulary: int, cost: TileCost, tile_bytes: int) -> tuple[int, int]:
    """(tokens, vocabulary entries) of a tile: all tokens if that leaves `NARROW` entries, otherwise some of both.

    Raises: InvalidArgumentError if one token and one vocabulary entry need more than ``tile_bytes``.
    """
    smallest = cost.of(1, 1)
    if smallest > tile_bytes:
        raise InvalidArgumentError(
            f"tile_bytes={tile_bytes}: one token and one vocabulary entry of this head need {smallest} bytes; "
            f"pass at least that, or {4 * NARROW * smallest} for speed"
        )
    width = (tile_bytes - tokens * cost.row) // (tokens * cost.cell + cost.column)
    if width >= min(NARROW, vocabulary):
        return tokens, _aligned(min(width, vocabulary), vocabulary)
    # Half of the bytes for what a vocabulary entry costs by itself, the rest for tokens.
    width = min(NARROW, vocabulary, tile_bytes // 2 // max(1, cost.column))
    width = max(1, min(width, (tile_bytes - cost.row) // (cost.cell + cost.column)))
    rows = (tile_bytes - width * cost.column) // (width * cost.cell + cost.row)
    return max(1, min(rows, tokens)), width


def _aligned(width: int, vocabulary: int) -> int:
    return width if width >= vocabulary or width < ALIGNED else width // ALIGNED * ALIGNED
