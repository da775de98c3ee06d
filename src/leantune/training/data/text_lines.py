"""The lines of a text file, with its encoding checked on the way."""

import codecs
from collections.abc import Iterator
from pathlib import Path

from leantune.training.data.problems import Place, Problem

_WIDE = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def text_lines(path: Path) -> Iterator[tuple[int, str] | Problem]:
    """(number from 1, text with its line end) for each line; a problem where one is not UTF-8, or nothing stands there.

    A byte-order mark and Windows line ends are taken, with a note.
    """
    blank, windows = True, False
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                if line[:2] in _WIDE:
                    yield _file(
                        path,
                        "it is UTF-16, and data must be UTF-8",
                        f"convert it: iconv -f utf-16 -t utf-8 {path.name}",
                    )
                    return
                if line.startswith(codecs.BOM_UTF8):
                    yield Problem(Place(str(path), 1), "it begins with a byte-order mark, left out", severity="note")
                    line = line[len(codecs.BOM_UTF8) :]
            if not windows and line.endswith(b"\r\n"):
                windows = True
                yield Problem(
                    Place(str(path), number), "lines end as on Windows (CR LF), taken as they are", "", "", "note"
                )
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                yield Problem(
                    Place(str(path), number),
                    f"byte {line[error.start]:#04x} is not UTF-8",
                    "convert the file (for Western Windows text: iconv -f cp1252 -t utf-8)",
                    severity="file",
                )
                blank = False
                continue
            blank = blank and not text.strip()
            yield number, text
    if blank:
        empty = path.stat().st_size == 0
        yield _file(path, "it is empty" if empty else "it holds only blank lines", "write a row a line")


def _file(path: Path, why: str, fix: str) -> Problem:
    return Problem(Place(str(path)), why, fix, severity="file")
