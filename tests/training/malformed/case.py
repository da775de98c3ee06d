"""One malformed file: what is written, what is asked for, and the whole message that must come."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """``files`` maps names to contents (a function writes its file itself); ``{d}`` in ``expected`` is their folder."""

    name: str
    files: dict[str, bytes | str | Callable[[Path], None]]
    expected: str
    settings: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the files; returns the settings, with the first file as the dataset where none is named."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if callable(content):
                content(path)
            else:
                path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        named = {key: _in_folder(value, folder) for key, value in self.settings.items()}
        return {"dataset": str(folder / next(iter(self.files), "none")), **named}

    def told(self, folder: Path) -> str:
        """The message expected, with the folder's name."""
        return self.expected.replace("{d}", str(folder))


def _in_folder(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_in_folder(item, folder) for item in value]
    return value.replace("{d}", str(folder)) if isinstance(value, str) else value


def rows(bad: int, of: int, *lines: str) -> str:
    """The message of a run that stops on rows: how many, what to do, and a line for each."""
    head = f"- dataset: {bad} of {of} rows cannot be used (drop_invalid: true leaves them out, and writes them to "
    return "\n  ".join([f"{head}dropped.jsonl):", *lines])


GOOD = '{"prompt": "2+2?\\n", "completion": "4"}\n'
ASKED, ANSWERED = {"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "Blue."}


def line(row: Any) -> str:
    """A row as a line of jsonl."""
    return json.dumps(row) + "\n"


def chat(*turns: Any) -> str:
    """A conversation as a line of jsonl."""
    return line({"messages": list(turns)})
