"""From a file or a hub name to token ids and labels; what is trained on is decided here, a row at a time."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leantune.errors import ConfigError
from leantune.training.chat import IGNORED, encode_chat
from leantune.training.config import TrainConfig
from leantune.training.shapes import BadRowError, Row, detect, unused_columns

_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass
class PreparedData:
    """``train`` and ``held_out`` are datasets of ``input_ids`` and ``labels`` (-100 where nothing is learnt)."""

    train: Any
    held_out: Any | None
    notes: list[str] = field(default_factory=list)
    longest: int = 0


def load_data(config: TrainConfig, tokenizer: Any) -> PreparedData:
    """Read, check and tokenise the data of a run.

    Chat data and alpaca train on assistant turns and the token that ends them, prompt/completion on the completion,
    text on everything. Rows that cannot be used (empty answers, unknown roles, nothing left to learn after truncation)
    are a ConfigError with row numbers, or with ``drop_invalid`` a note.
    """
    notes: list[str] = []
    train = _encode_all("dataset", config.dataset, config, tokenizer, notes)
    held_out = None
    if config.eval_dataset:
        held_out = _encode_all("eval_dataset", config.eval_dataset, config, tokenizer, notes)
    elif config.eval_split:
        held = round(len(train) * config.eval_split)
        if not 0 < held < len(train):
            raise ConfigError(
                f"- eval_split: {config.eval_split} of {len(train)} rows is {held}; both parts need a row"
            )
        parts = train.train_test_split(test_size=held, seed=config.seed)
        train, held_out = parts["train"], parts["test"]
    longest = max(len(ids) for ids in train["input_ids"])
    return PreparedData(train, held_out, notes, longest)


def _read(key: str, source: str) -> Any:
    """A datasets.Dataset from a file, a folder, or a hub name (``name`` or ``name:split``); errors begin with ``key``.

    In a folder, files named as another split (test, validation) are left out: datasets' own rules of naming.
    """
    from datasets import load_dataset, load_from_disk

    path = Path(source)
    try:
        if (path / "state.json").is_file():
            return load_from_disk(source)
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix in _READERS)
            if not files:
                raise ConfigError(f"- {key}: no {', '.join(_READERS)} file in {path}")
            kinds = {_READERS[file.suffix] for file in files}
            if len(kinds) > 1:
                endings = ", ".join(sorted({file.suffix for file in files}))
                raise ConfigError(f"- {key}: {path} mixes {endings} files; name the one to use")
            return load_dataset(source, split="train", **_reading(key, files))
        if path.is_file():
            if path.suffix not in _READERS:
                raise ConfigError(f"- {key}: {path} ends in {path.suffix!r}; files end in {', '.join(_READERS)}")
            return load_dataset(_READERS[path.suffix], data_files=str(path), split="train", **_reading(key, [path]))
        if path.suffix in _READERS:
            raise ConfigError(f"- {key}: there is no file {path}")
        name, _, split = source.partition(":")
        return load_dataset(name, split=split or "train")
    except ConfigError:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
        if "corresponds to no data" in reason:
            reason = "it holds no rows"
        raise ConfigError(f"- {key} {source!r} cannot be read: {reason}") from error


def _reading(key: str, files: list[Path]) -> dict[str, Any]:
    """Arguments for reading files of one kind, after a look at each: text must be UTF-8 and hold something."""
    for file in files:
        if file.stat().st_size == 0:
            raise ConfigError(f"- {key}: {file} is empty")
        if file.suffix != ".parquet":
            _check_text(key, file)
    if files[0].suffix != ".csv":
        return {}
    import pandas
    from datasets import Features, Value

    # A cell of a csv file is text: pandas alone would read 2.50 as 2.5, and the answer "None" as nothing.
    columns = pandas.read_csv(files[0], nrows=0).columns
    return {"features": Features({str(name): Value("string") for name in columns}), "keep_default_na": False}


def _check_text(key: str, file: Path) -> None:
    blank = True
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                blank = not line.decode("utf-8-sig").strip() and blank
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"- {key}: {file}, line {number}: byte {line[error.start]:#04x} is not UTF-8; convert the file "
                    "(for Western Windows text: iconv -f cp1252 -t utf-8)"
                ) from None
    if blank:
        raise ConfigError(f"- {key}: {file} holds only blank lines")


def _encode_all(key: str, source: str, config: TrainConfig, tokenizer: Any, notes: list[str]) -> Any:
    from datasets import Dataset

    rows = _read(key, source)
    convert = detect(list(rows.column_names))
    if unused := unused_columns(list(rows.column_names)):
        notes.append(f"{source}: not used: the columns {', '.join(unused)}")
    encoded: list[Row] = []
    bad: list[str] = []
    cut, longest = 0, 0
    for number, row in enumerate(rows, 1):
        try:
            ids, labels = encode(convert(row), tokenizer)
            cut, longest = cut + (len(ids) > config.max_length), max(longest, len(ids))
            ids, labels = ids[: config.max_length], labels[: config.max_length]
            if all(label == IGNORED for label in labels[1:]):
                raise BadRowError(f"nothing is left to learn within max_length {config.max_length}")
            encoded.append({"input_ids": ids, "labels": labels})
        except BadRowError as error:
            bad.append(f"row {number}: {error}")
    if bad:
        listed = "\n  ".join([*bad[:10], *([f"and {len(bad) - 10} more"] if len(bad) > 10 else [])])
        if not config.drop_invalid:
            raise ConfigError(
                f"- {source}: {len(bad)} of {len(rows)} rows cannot be used (drop_invalid: true leaves them out):\n  "
                f"{listed}"
            )
        notes.append(f"{source}: dropped {len(bad)} of {len(rows)} rows:\n  {listed}")
    if not encoded:
        raise ConfigError(f"- {source}: no row is left to train on" + (f":\n  {listed}" if bad else ""))
    if cut:
        notes.append(
            f"{source}: {cut} of {len(rows)} rows are longer than max_length {config.max_length} (the longest: "
            f"{longest} tokens) and were cut; from those the model does not learn to stop"
        )
    return Dataset.from_list(encoded)


def encode(row: Row, tokenizer: Any) -> tuple[list[int], list[int]]:
    """(input_ids, labels) of one converted row, before truncation.

    Raises BadRowError where the row cannot be used, ConfigError where the tokenizer cannot be.
    """
    if "messages" in row:
        return encode_chat(row["messages"], tokenizer, row.get("learnt_from", 0))
    if tokenizer.eos_token_id is None:
        raise ConfigError("- the tokenizer has no eos_token, so the model could not learn to stop; give it one")
    if "text" in row:
        ids = _ended(_tokens(row["text"], tokenizer), tokenizer)
        return ids, list(ids)
    prompt = _tokens(row["prompt"], tokenizer)
    while prompt and prompt[-1] == tokenizer.eos_token_id:
        prompt.pop()  # a tokenizer that ends every text would end the prompt before its completion
    whole = _ended(_tokens(row["prompt"] + row["completion"], tokenizer), tokenizer)
    if whole[: len(prompt)] == prompt:
        answer = whole[len(prompt) :]
    else:
        # A token spans the border. The prompt is kept as it will be tokenised when the model is asked.
        answer = _ended(tokenizer(row["completion"], add_special_tokens=False)["input_ids"], tokenizer)
    return prompt + answer, [IGNORED] * len(prompt) + answer


def _tokens(text: str, tokenizer: Any) -> list[int]:
    """``text`` with the tokenizer's special tokens, and no second BOS where the text brings its own."""
    bos = tokenizer.bos_token
    own = bool(bos) and text.startswith(bos)
    return list(tokenizer(text, add_special_tokens=not own)["input_ids"])


def _ended(ids: list[int], tokenizer: Any) -> list[int]:
    """``ids`` and one EOS, whether or not the text or the tokenizer has brought its own."""
    end = tokenizer.eos_token_id
    while ids and ids[-1] == end:
        ids = ids[:-1]
    return [*ids, end]
