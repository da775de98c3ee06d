"""Sizes as users write them, and as we write them."""

import pytest

from leantune.errors import InvalidArgumentError, InvalidTypeError
from leantune.memory.sizes import format_bytes, parse_size, plot_unit


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 2**30),
        ("24 GiB", 24 * 2**30),
        ("24gb", 24 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        (".5KB", 500),
        ("2TiB", 2**41),
        (" 100 B ", 100),
        (12345, 12345),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("24", "no unit"),
        ("24 G", "unknown unit 'g'"),
        ("lots", "not a size"),
        ("-3GiB", "not a size"),
        ("1e9B", "not a size"),
        ("", "not a size"),
        ("0GiB", "at least 1 byte"),
        (-5, "at least 1 byte"),
    ],
)
def test_what_is_no_size_is_refused_by_name(text, said):
    with pytest.raises(InvalidArgumentError, match=said) as error:
        parse_size(text, name="memory_budget")
    assert "memory_budget" in str(error.value)


@pytest.mark.parametrize("value", [1.5, None, True, ["24GiB"]])
def test_other_types_are_refused(value):
    with pytest.raises(InvalidTypeError, match="24GiB"):
        parse_size(value)


def test_bytes_are_written_in_binary_units():
    assert format_bytes(2**30 - 1) == "1024.0 MiB"
    assert format_bytes(-(5 * 2**30)) == "-5.00 GiB"
    assert format_bytes(2**20, signed=True) == "+1.0 MiB"
    assert plot_unit(10) == (1024, "KiB")
