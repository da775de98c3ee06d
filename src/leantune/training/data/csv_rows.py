"""Rows of a .csv or .tsv file: cells are text, and every row has as many as the header."""

import csv
from collections.abc import Iterator
from pathlib import Path

from leantune.training.data.problems import Place, Problem
from leantune.training.data.shapes import shape_of
from leantune.training.data.text_lines import text_lines

_SEPARATORS = (",", ";", "\t", "|")
_LARGEST_CELL = 2**31 - 1  # the csv module stops at 128 KiB otherwise: shorter than a document


def csv_rows(path: Path) -> Iterator[tuple[Place, dict[str, str]] | Problem]:
    """(place, {column: cell}) for each row after the header, and what cannot be read.

    The separator is the one under which the header is a shape that is known (comma, semicolon, tab, bar), else the
    comma. A place's line is the one on which the row begins: a cell in quotes may go on over several.
    """
    csv.field_size_limit(_LARGEST_CELL)
    faults: list[Problem] = []
    lines = _decoded(path, faults)
    header = next(lines, None)
    if header is None:
        yield from faults
        return
    separator = _separator(header)
    reader = csv.reader(_put_back(header, lines), delimiter=separator, strict=True)
    names: list[str] | None = None
    number = 0
    while True:
        place = Place(str(path), reader.line_num + 1, None if names is None else number + 1)
        try:
            cells = next(reader, None)
        except csv.Error as error:
            if "end of data" in str(error):
                why = "a quote opened in this row is never closed: all lines after it are one cell"
                yield Problem(place, why, 'close it, or double it inside a cell ("")', severity="file")
                break
            number += names is not None
            fix = 'put a cell with quotes in quotes, and double those inside ("")'
            yield Problem(place, f"not csv: {error}", fix, severity="row" if names else "file")
            continue
        yield from faults
        faults.clear()
        if cells is None:
            break
        if not cells or cells == [""]:
            continue
        if names is None:
            names = [cell.strip() for cell in cells]
            if problem := _wrong_header(place, names):
                yield problem
                return
            if separator != ",":
                yield Problem(place, f"cells are separated by {separator!r}", severity="note")
            continue
        number += 1
        if len(cells) != len(names):
            yield Problem(
                place,
                f"it has {len(cells)} cells, and the header has {len(names)} ({', '.join(names)})",
                f"put a cell that holds {separator!r} in quotes",
                raw=dict(zip(names, cells)) | ({"more": cells[len(names) :]} if len(cells) > len(names) else {}),
            )
            continue
        yield place, dict(zip(names, cells))
    yield from faults


def _decoded(path: Path, faults: list[Problem]) -> Iterator[str]:
    for item in text_lines(path):
        if isinstance(item, Problem):
            faults.append(item)
            if item.place.line is not None and item.severity == "file":
                yield "\n"  # keeps the count of lines; the file cannot be used anyway
        else:
            yield item[1]


def _put_back(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _separator(header: str) -> str:
    for separator in _SEPARATORS:
        try:
            if shape_of(tuple(next(csv.reader([header], delimiter=separator), []))) is not None:
                return separator
        except csv.Error:
            continue
    return ","


def _wrong_header(place: Place, names: list[str]) -> Problem | None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        fix = "give each column a name of its own"
        return Problem(place, f"the header names a column twice: {', '.join(map(repr, twice))}", fix, severity="file")
    return None
