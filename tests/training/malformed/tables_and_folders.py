"""csv and parquet files, and names under which there is nothing to read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.malformed.case import GOOD, Case, rows

from leantune.training.data.shapes import ACCEPTED


def parquet(rows: list[dict[str, Any]]) -> Callable[[Path], None]:
    """What writes these rows as a parquet file."""

    def write(path: Path) -> None:
        import pyarrow
        from pyarrow.parquet import write_table

        write_table(pyarrow.Table.from_pylist(rows), path)

    return write


TABLES = [
    Case(
        "no columns known",
        {"d.csv": "title,body\na,b\n"},
        (
            "- dataset: {d}/d.csv: the rows have the columns 'title', 'body', which are no shape known "
            "here (is its first line a header?).\n"
        )
        + ACCEPTED,
    ),
    Case(
        "a header twice",
        {"d.csv": "prompt,prompt,completion\na,b,c\n"},
        ("- dataset: {d}/d.csv, line 1: the header names a column twice: 'prompt'; give each column a name of its own"),
    ),
    Case("a header alone", {"d.csv": "prompt,completion\n"}, "- dataset: {d}/d.csv: it holds no rows"),
    Case(
        "a cell too many",
        {"d.csv": "question,answer\n2+2?,4\nRed, or blue?,red\n"},
        rows(
            1,
            2,
            (
                "{d}/d.csv, line 3: it has 3 cells, and the header has 2 (question, answer); put a cell that "
                "holds ',' in quotes"
            ),
        ),
    ),
    Case(
        "a quote never closed",
        {"d.csv": 'question,answer\n"2+2?,4\n3+3?,6\n'},
        (
            "- dataset: {d}/d.csv, line 2: a quote opened in this row is never closed: all lines after it "
            'are one cell; close it, or double it inside a cell ("")'
        ),
    ),
    Case(
        "a quote inside a cell",
        {"d.csv": 'question,answer\n"He said "no"?",4\n3+3?,6\n'},
        rows(
            1,
            2,
            (
                "{d}/d.csv, line 2: not csv: ',' expected after '\"'; put a cell with quotes in quotes, and "
                'double those inside ("")'
            ),
        ),
    ),
    Case(
        "an empty cell on a later line",
        {"d.csv": 'question,answer\n"two\nlines?",4\n3+3?,\n'},
        rows(1, 2, "{d}/d.csv, line 4: answer: it is empty; fill it in, or leave the row out"),
    ),
    Case(
        "a csv file in Western Windows text",
        {"d.csv": "question,answer\ncaf\xe9?,yes\n".encode("cp1252")},
        (
            "- dataset: {d}/d.csv, line 2: byte 0xe9 is not UTF-8; convert the file (for Western Windows "
            "text: iconv -f cp1252 -t utf-8)"
        ),
    ),
    Case(
        "no parquet",
        {"d.parquet": b"PAR1 and no more"},
        (
            "- dataset: {d}/d.parquet: it cannot be read as parquet: Parquet magic bytes not found in "
            "footer. Either the file is corrupted or this is not a parquet file; write or copy it again"
        ),
    ),
    Case(
        "a parquet file with a missing value",
        {"d.parquet": parquet([{"prompt": "a ", "completion": "b"}, {"prompt": "c ", "completion": None}])},
        rows(1, 2, "{d}/d.parquet, row 2: completion: it is empty; fill it in, or leave the row out"),
    ),
    Case(
        "a spreadsheet",
        {"d.xlsx": b"PK"},
        (
            "- dataset: {d}/d.xlsx ends in '.xlsx'; files end in .jsonl, .json, .ndjson, .csv, .tsv, "
            ".parquet: save the sheet as csv"
        ),
    ),
    Case(
        "a text file",
        {"d.txt": "a\n"},
        (
            "- dataset: {d}/d.txt ends in '.txt'; files end in .jsonl, .json, .ndjson, .csv, .tsv, "
            '.parquet: write each document as a line {"text": "..."} of a .jsonl file'
        ),
    ),
    Case(
        "a file that is not there",
        {},
        "- dataset: there is no file or folder {d}/none.jsonl",
        {"dataset": "{d}/none.jsonl"},
    ),
    Case(
        "a folder without data",
        {"f/readme.md": "a"},
        "- dataset: no .jsonl, .json, .ndjson, .csv, .tsv, .parquet file in {d}/f",
        {"dataset": "{d}/f"},
    ),
    Case(
        "a folder of two kinds",
        {"f/a.jsonl": GOOD, "f/b.csv": "text\na\n"},
        "- dataset: {d}/f mixes .csv, .jsonl files; name the one to use",
        {"dataset": "{d}/f"},
    ),
    Case(
        "a folder of tests alone",
        {"f/test.jsonl": GOOD},
        "- dataset: the files in {d}/f are named as test alone; name one with train, or give its path",
        {"dataset": "{d}/f"},
    ),
]
