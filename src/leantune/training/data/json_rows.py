"""Rows of JSON text: one object a line, or one list of objects, each with the line on which it begins."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leantune.training.data.problems import Place, Problem
from leantune.training.data.text_lines import text_lines

_GAP = re.compile(r"[ \t\r\n]*")
_ONE_A_LINE = 'write one object a line, {"prompt": "...", "completion": "..."}, or one list of objects'


class _DoubleKeyError(ValueError):
    pass


def json_rows(path: Path) -> Iterator[tuple[Place, dict[str, Any]] | Problem]:
    """The rows of a .json or .jsonl file in either form (told by its first character), and what cannot be read."""
    lines = text_lines(path)
    for item in lines:
        if isinstance(item, Problem):
            yield item
        elif item[1].strip():
            together = itertools.chain([item], lines)
            if item[1].lstrip().startswith("["):
                yield from _listed(path, together)
            else:
                yield from _one_a_line(path, together)


def _one_a_line(path: Path, lines: Iterator[tuple[int, str] | Problem]) -> Iterator[tuple[Place, Any] | Problem]:
    row = 0
    for item in lines:
        if isinstance(item, Problem):
            yield item
            continue
        number, line = item
        if not (text := line.strip()):
            continue
        row += 1
        place = Place(str(path), number, row)
        try:
            yield _object(place, json.loads(text, object_pairs_hook=_once), text)
        except json.JSONDecodeError as error:
            if row == 1 and (spread := _spread(path, text, lines)) is not None:
                yield spread
                return
            yield Problem(place, _broken(error), _repair(text, line), raw=text)
        except (_DoubleKeyError, RecursionError, ValueError) as error:
            yield Problem(place, _refused(error), raw=text)


def _spread(path: Path, first: str, lines: Iterator[tuple[int, str] | Problem]) -> Problem | None:
    """The fault of a file whose first line opens an object that goes on over the next lines; None for other files."""
    if first not in ("{", '{"') and not re.fullmatch(r'\{\s*"[^"]*"\s*:\s*[\[{]?', first):
        return None
    whole = "\n".join([first, *(item[1] for item in lines if not isinstance(item, Problem))])
    try:
        value = json.loads(whole)
    except ValueError:
        return Problem(Place(str(path), 1), "its objects go on over several lines", _ONE_A_LINE, severity="file")
    lists = [key for key, rows in value.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)]
    if len(lists) == 1:
        why = f"it is one object, whose {lists[0]!r} seems to hold the rows"
        return Problem(Place(str(path)), why, f"write the list under {lists[0]!r} alone", severity="file")
    return Problem(Place(str(path)), "it is one object over several lines", _ONE_A_LINE, severity="file")


def _listed(path: Path, lines: Iterator[tuple[int, str] | Problem]) -> Iterator[tuple[Place, Any] | Problem]:
    """The objects of one list, decoded one at a time: the text is held once, the rows are not."""
    texts = []
    first = 0
    for item in lines:
        if isinstance(item, Problem):
            yield item
        else:
            first = first or item[0]
            texts.append(item[1])
    text = "".join(texts)
    del texts
    decoder = json.JSONDecoder(object_pairs_hook=_once)
    place, line, counted, row = text.index("[") + 1, first, 0, 0
    while True:
        place = _after_gap(text, place)
        if text[place : place + 1] == "]" and row == 0:
            break
        line, counted, row = line + text.count("\n", counted, place), place, row + 1
        try:
            value, end = decoder.raw_decode(text, place)
            yield _object(Place(str(path), line, row), value, text[place:end])
        except (ValueError, RecursionError) as error:
            why = _broken(error) if isinstance(error, json.JSONDecodeError) else _refused(error)
            at = line
            if isinstance(error, json.JSONDecodeError):
                at = first + text.count("\n", 0, error.pos)
            fix = "the rest of the list cannot be read; repair it there"
            yield Problem(Place(str(path), at, row), why, fix, severity="file")
            return
        place = _after_gap(text, end)
        if text[place : place + 1] == ",":
            place += 1
        elif text[place : place + 1] == "]":
            break
        else:
            where = Place(str(path), first + text.count("\n", 0, place), row)
            told = "the list ends without ]" if place >= len(text) else f"{text[place]!r} stands where , or ] belongs"
            yield Problem(where, told, "the rest of the list cannot be read; repair it there", severity="file")
            return
    place = _after_gap(text, place + 1)
    if place < len(text):
        where = Place(str(path), first + text.count("\n", 0, place))
        yield Problem(where, "there is more after the list's ]", "keep one list a file", severity="file")


def _after_gap(text: str, place: int) -> int:
    gap = _GAP.match(text, place)
    return gap.end() if gap else place


def _object(place: Place, value: Any, text: str) -> tuple[Place, dict[str, Any]] | Problem:
    if isinstance(value, dict):
        return place, value
    kind = {list: "a list", str: "text", type(None): "null", bool: "true or false"}.get(type(value), "a number")
    return Problem(place, f"the row is {kind}, not an object", 'a row is {"column": value, ...}', raw=text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys stand once; json itself silently keeps the last of two."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _DoubleKeyError(f"the key {twice!r} stands twice; keep one of them")
    return made


def _broken(error: json.JSONDecodeError) -> str:
    message = error.msg[0].lower() + error.msg[1:]
    return f"not JSON at column {error.colno}: {message}"


def _refused(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply to be read"
    return str(error).split(":")[0] if not isinstance(error, _DoubleKeyError) else str(error)


def _repair(text: str, line: str) -> str:
    if text.startswith(("{'", "[{'")):
        return 'JSON takes double quotes, {"text": "..."}: write rows with json.dumps'
    if text.startswith("{") and not text.endswith("}") and not line.endswith(("\n", "\r")):
        return "the file ends inside this row, as one cut short while it was copied does"
    if text.startswith("{") and text.count("}{"):
        return "write one object a line"
    return "repair the line"
