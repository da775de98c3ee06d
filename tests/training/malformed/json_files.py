"""JSON text that is broken as text."""

import json

from training.malformed.case import GOOD, Case, rows

JSON = [
    Case("an empty file", {"d.jsonl": b""}, "- dataset: {d}/d.jsonl: it is empty; write a row a line"),
    Case(
        "blank lines alone",
        {"d.jsonl": b"\n  \n\r\n"},
        "- dataset: {d}/d.jsonl: it holds only blank lines; write a row a line",
    ),
    Case(
        "a corrupt line",
        {"d.jsonl": GOOD + '{"prompt": "3+3?", "completion" "6"}\n' + GOOD},
        rows(1, 3, "{d}/d.jsonl, line 2: not JSON at column 33: expecting ':' delimiter; repair the line"),
    ),
    Case(
        "a file cut short",
        {"d.jsonl": GOOD + '{"prompt": "3+3?", "compl'},
        rows(
            1,
            2,
            (
                "{d}/d.jsonl, line 2: not JSON at column 20: unterminated string starting at; the file ends "
                "inside this row, as one cut short while it was copied does"
            ),
        ),
    ),
    Case(
        "single quotes",
        {"d.jsonl": "{'prompt': 'a', 'completion': 'b'}\n"},
        rows(
            1,
            1,
            (
                "{d}/d.jsonl, line 1: not JSON at column 2: expecting property name enclosed in double quotes; "
                'JSON takes double quotes, {"text": "..."}: write rows with json.dumps'
            ),
        ),
    ),
    Case(
        "two objects on a line",
        {"d.jsonl": GOOD.strip() + GOOD},
        rows(1, 1, "{d}/d.jsonl, line 1: not JSON at column 40: extra data; write one object a line"),
    ),
    Case(
        "an object over several lines",
        {"d.json": '{\n  "prompt": "a",\n  "completion": "b"\n}\n{\n  "prompt": "c",\n  "completion": "d"\n}\n'},
        (
            "- dataset: {d}/d.json, line 1: its objects go on over several lines; write one object a line, "
            '{"prompt": "...", "completion": "..."}, or one list of objects'
        ),
    ),
    Case(
        "rows under a key",
        {"d.json": json.dumps({"version": 1, "data": [{"text": "a"}]}, indent=1)},
        (
            "- dataset: {d}/d.json: it is one object, whose 'data' seems to hold the rows; write the list "
            "under 'data' alone"
        ),
    ),
    Case(
        "a list cut short",
        {"d.json": '[\n {"text": "a"},\n {"text": "b"}\n'},
        (
            "- dataset: {d}/d.json, line 4: the list ends without ]; the rest of the list cannot be read; "
            "repair it there"
        ),
    ),
    Case(
        "a list with a broken row",
        {"d.json": '[\n {"text": "a"},\n {"text": b}\n]'},
        (
            "- dataset: {d}/d.json, line 3: not JSON at column 11: expecting value; the rest of the list "
            "cannot be read; repair it there"
        ),
    ),
    Case(
        "more after a list",
        {"d.json": '[{"text": "a"}]\n[{"text": "b"}]'},
        "- dataset: {d}/d.json, line 2: there is more after the list's ]; keep one list a file",
    ),
    Case("an empty list", {"d.json": "[]"}, "- dataset: {d}/d.json: it holds no rows"),
    Case(
        "a key twice",
        {"d.jsonl": '{"prompt": "a", "completion": "b", "prompt": "c"}\n'},
        rows(1, 1, "{d}/d.jsonl, line 1: the key 'prompt' stands twice; keep one of them"),
    ),
    Case(
        "rows that are no objects",
        {"d.jsonl": '"a text"\n["a list"]\n3\nnull\n'},
        rows(
            4,
            4,
            '{d}/d.jsonl, line 1: the row is text, not an object; a row is {"column": value, ...}',
            '{d}/d.jsonl, line 2: the row is a list, not an object; a row is {"column": value, ...}',
            '{d}/d.jsonl, line 3: the row is a number, not an object; a row is {"column": value, ...}',
            '{d}/d.jsonl, line 4: the row is null, not an object; a row is {"column": value, ...}',
        ),
    ),
    Case(
        "nested too deeply",
        {"d.jsonl": GOOD + '{"text": ' + "[" * 100000 + "\n"},
        rows(1, 2, "{d}/d.jsonl, line 2: it is nested too deeply to be read"),
    ),
    Case(
        "UTF-16",
        {"d.jsonl": GOOD.encode("utf-16")},
        ("- dataset: {d}/d.jsonl: it is UTF-16, and data must be UTF-8; convert it: iconv -f utf-16 -t utf-8 d.jsonl"),
    ),
    Case(
        "Western Windows text",
        {"d.jsonl": GOOD.encode() + '{"text": "caf\xe9"}\n'.encode("cp1252")},
        (
            "- dataset: {d}/d.jsonl, line 2: byte 0xe9 is not UTF-8; convert the file (for Western Windows "
            "text: iconv -f cp1252 -t utf-8)"
        ),
    ),
    Case(
        "half a character",
        {"d.jsonl": '{"text": "smile \\ud83d"}\n'},
        rows(
            1,
            1,
            ("{d}/d.jsonl, line 1: text: it holds half a character (\\ud83d); write the whole pair, or leave it out"),
        ),
    ),
]
