"""From the name of a data set to its rows, one at a time: files, folders, saved data sets, the hub."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leantune.errors import ConfigError
from leantune.training.data.csv_rows import csv_rows
from leantune.training.data.json_rows import json_rows
from leantune.training.data.problems import Place, Problem

READERS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_INSTEAD = {
    ".xlsx": "save the sheet as csv",
    ".xls": "save the sheet as csv",
    ".txt": 'write each document as a line {"text": "..."} of a .jsonl file',
    ".gz": "unpack it",
    ".zip": "unpack it",
    ".zst": "unpack it",
}

Found = tuple[Place, dict[str, Any]]


def read(key: str, source: str, *, streaming: bool = False) -> Iterator[Found | Problem]:
    """The rows of a file, a folder, a data set saved by ``save_to_disk``, or a hub name (``name`` or ``name:split``).

    Rows come one at a time and none is kept; what cannot be read comes as a Problem with its place.

    Args:
        key: the key of the config the name stands under; errors begin with it.
        source: the name.
        streaming: rows of the hub are fetched as they are needed, and never stored.
    Raises: ConfigError where there is nothing under that name, or it is of a kind that is not read here.
    """
    path = Path(source)
    if (path / "state.json").is_file():
        return _saved(key, source)
    files = find_files(key, source)
    if files is None:
        return _hub(key, source, streaming)
    return _files(files)


def find_files(key: str, source: str) -> list[Path] | None:
    """The files a name stands for, or None where it is a name of the hub.

    In a folder, files named as another split (test, validation) are left out: datasets' own rules of naming.
    """
    path = Path(source)
    if path.is_dir():
        return _in_folder(key, path)
    if path.is_file():
        if path.suffix.lower() not in READERS:
            instead = _INSTEAD.get(path.suffix.lower())
            raise ConfigError(
                f"- {key}: {path} ends in {path.suffix!r}; files end in {', '.join(READERS)}"
                + (f": {instead}" if instead else "")
            )
        return [path]
    if path.suffix.lower() in READERS or path.is_absolute() or source.startswith(("./", "../", "~")):
        raise ConfigError(f"- {key}: there is no file or folder {path}")
    return None


def _in_folder(key: str, path: Path) -> list[Path]:
    from datasets.data_files import DataFilesList, get_data_patterns

    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in READERS)
    if not found:
        raise ConfigError(f"- {key}: no {', '.join(READERS)} file in {path}")
    if len({READERS[file.suffix.lower()] for file in found}) > 1:
        endings = ", ".join(sorted({file.suffix for file in found}))
        raise ConfigError(f"- {key}: {path} mixes {endings} files; name the one to use")
    patterns = get_data_patterns(str(path))
    if "train" not in patterns:
        raise ConfigError(
            f"- {key}: the files in {path} are named as {', '.join(map(str, patterns))} alone; name one with train, or "
            "give its path"
        )
    suffixes = sorted({file.suffix for file in found})
    return [
        Path(name)
        for name in DataFilesList.from_patterns(patterns["train"], base_path=str(path), allowed_extensions=suffixes)
    ]


def _files(files: list[Path]) -> Iterator[Found | Problem]:
    kinds = {"json": json_rows, "csv": csv_rows, "parquet": _parquet_rows}
    for file in files:
        yield from kinds[READERS[file.suffix.lower()]](file)


def _parquet_rows(path: Path) -> Iterator[Found | Problem]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield Place(str(path), row=number), row
    except (pyarrow.ArrowInvalid, OSError) as error:
        why = f"it cannot be read as parquet: {(str(error).splitlines() or [''])[0].rstrip('.')}"
        yield Problem(Place(str(path)), why, "write or copy it again", severity="file")


def _saved(key: str, source: str) -> Iterator[Found]:
    from datasets import DatasetDict, load_from_disk

    try:
        rows = load_from_disk(source)
    except Exception as error:
        raise _unreadable(key, source, error) from error
    if isinstance(rows, DatasetDict):
        raise ConfigError(f"- {key}: {source} holds the parts {', '.join(rows)}; give the folder of one of them")
    return _numbered(source, rows)


def _hub(key: str, source: str, streaming: bool) -> Iterator[Found]:
    from datasets import load_dataset

    name, _, split = source.partition(":")
    try:
        rows = load_dataset(name, split=split or "train", streaming=streaming)
    except Exception as error:
        raise _unreadable(key, source, error) from error
    return _numbered(source, rows)


def _numbered(source: str, rows: Any) -> Iterator[Found]:
    for number, row in enumerate(rows, 1):
        yield Place(source, row=number), row


def _unreadable(key: str, source: str, error: Exception) -> ConfigError:
    cause = error.__cause__ or error
    reason = f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
    return ConfigError(f"- {key} {source!r} is no file or folder here, and cannot be read from the hub: {reason}")
