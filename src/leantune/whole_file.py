"""Files that are whole or not there: written aside, then renamed into place."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` to write into, which then takes its place. Where writing fails, or the process is killed,
    what stood at ``path`` before still does."""
    aside = path.with_name(f".{path.name}.writing")
    try:
        yield aside
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, by `replacing`."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")
