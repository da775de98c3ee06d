"""Sizes in bytes: reading what a user types ("24GiB", "24GB"), and writing what a reader can compare."""

import math
import re

from leantune.errors import InvalidArgumentError, InvalidTypeError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)")


def parse_size(text: str | int, *, name: str = "size") -> int:
    """Bytes meant by ``text``: "24GiB" (binary, 2**30), "24GB" (decimal, 10**9), "512 MiB", or an int of bytes.

    Args:
        text: a number with a unit (B, KiB, MiB, GiB, TiB, KB, MB, GB, TB; case is ignored), or an int of bytes.
        name: what the size is for; the errors name it.
    Returns: bytes, rounded down, more than 0.
    Raises: InvalidTypeError for anything but str and int; InvalidArgumentError for text that is no size, a missing or
        unknown unit, or a size under one byte.

    >>> parse_size("24GiB"), parse_size("24 gb"), parse_size("1.5MiB"), parse_size(4096)
    (25769803776, 24000000000, 1572864, 4096)
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise InvalidTypeError(
            f'{name} is {text!r} ({type(text).__name__}); write text like "24GiB", or an int of bytes'
        )
    if isinstance(text, int):
        size = text
    else:
        size = _parse_text(text, name)
    if size < 1:
        raise InvalidArgumentError(f"{name} is {text!r}, which is {size} bytes; it must be at least 1 byte")
    return size


def _parse_text(text: str, name: str) -> int:
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise InvalidArgumentError(
            f'{name} {text!r} is not a size; write a number and a unit, like "24GiB" or "512MiB"'
        )
    number, unit = match.groups()
    if not unit:
        raise InvalidArgumentError(
            f"{name} {text!r} has no unit, so it could mean bytes or GiB; write {number + 'GiB'!r} (2**30 bytes) or "
            f"{number + 'GB'!r} (10**9 bytes)"
        )
    if unit not in _UNITS:
        known = "B, KiB, MiB, GiB, TiB (powers of 1024), KB, MB, GB, TB (powers of 1000)"
        raise InvalidArgumentError(f"{name} {text!r} has the unknown unit {unit!r}; units are {known}")
    return math.floor(float(number) * _UNITS[unit])


def format_bytes(size: float, *, signed: bool = False) -> str:
    """``size`` bytes in the largest binary unit that leaves at least one: "1.50 GiB", "12.0 MiB", "512 B".

    >>> format_bytes(3 * GIB // 2), format_bytes(12 * MIB), format_bytes(512), format_bytes(-KIB), format_bytes(0)
    ('1.50 GiB', '12.0 MiB', '512 B', '-1.0 KiB', '0 B')
    """
    sign = "-" if size < 0 else ("+" if signed else "")
    magnitude = abs(size)
    for unit, scale, digits in (("GiB", GIB, 2), ("MiB", MIB, 1), ("KiB", KIB, 1)):
        if magnitude >= scale:
            return f"{sign}{magnitude / scale:.{digits}f} {unit}"
    return f"{sign}{magnitude:.0f} B"


def plot_unit(largest: float) -> tuple[float, str]:
    """(bytes in one unit, its name) in which an axis reaching ``largest`` bytes is drawn: GiB, MiB or KiB.

    >>> plot_unit(3 * GIB), plot_unit(40 * MIB)
    ((1073741824, 'GiB'), (1048576, 'MiB'))
    """
    for scale, unit in ((GIB, "GiB"), (MIB, "MiB")):
        if largest >= scale:
            return scale, unit
    return KIB, "KiB"
