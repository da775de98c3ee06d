"""From a file or a hub name to token ids and labels; what is trained on is decided here, a row at a time."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leantune.errors import ConfigError
from leantune.training.config import TrainConfig
from leantune.training.shapes import BadRowError, Row, detect

IGNORED = -100
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

    Chat data and alpaca train on assistant turns and the token that ends them, prompt/completion on the completion, text on
    everything. Rows that cannot be used (empty answers, unknown roles, nothing left to learn after truncation) are a ConfigError
    with row numbers, or with ``drop_invalid`` a note.
    """
    notes: list[str] = []
    train = _encode_all(_read(config.dataset), config, tokenizer, config.dataset, notes)
    held_out = None
    if config.eval_dataset:
        held_out = _encode_all(_read(config.eval_dataset), config, tokenizer, config.eval_dataset, notes)
    elif config.eval_split:
        parts = train.train_test_split(test_size=config.eval_split, seed=config.seed)
        train, held_out = parts["train"], parts["test"]
    longest = max(len(ids) for ids in train["input_ids"])
    return PreparedData(train, held_out, notes, longest)


def _read(source: str) -> Any:
    """A datasets.Dataset from a file, a folder of files, or a hub name (``name`` or ``name:split``)."""
    from datasets import load_dataset

    path = Path(source)
    try:
        if path.is_dir():
            files = sorted(str(file) for file in path.iterdir() if file.suffix in _READERS)
            if not files:
                raise ConfigError(f"- dataset: no .jsonl, .json, .csv or .parquet file in {path}")
            return load_dataset(_READERS[Path(files[0]).suffix], data_files=files, split="train")
        if path.is_file():
            if path.suffix not in _READERS:
                raise ConfigError(f"- dataset: {path} ends in {path.suffix!r}; files end in {', '.join(_READERS)}")
            if path.stat().st_size == 0:
                raise ConfigError(f"- dataset: {path} is empty")
            return load_dataset(_READERS[path.suffix], data_files=str(path), split="train")
        if path.suffix in _READERS:
            raise ConfigError(f"- dataset: there is no file {path}")
        name, _, split = source.partition(":")
        return load_dataset(name, split=split or "train")
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"- dataset {source!r} cannot be read: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error


def _encode_all(rows: Any, config: TrainConfig, tokenizer: Any, source: str, notes: list[str]) -> Any:
    from datasets import Dataset

    convert = detect(list(rows.column_names))
    encoded: list[Row] = []
    bad: list[str] = []
    for number, row in enumerate(rows, 1):
        try:
            ids, labels = encode(convert(row), tokenizer)
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
                f"- {source}: {len(bad)} of {len(rows)} rows cannot be used (drop_invalid: true leaves them out):\n  {listed}"
            )
        notes.append(f"{source}: dropped {len(bad)} of {len(rows)} rows:\n  {listed}")
    if not encoded:
        raise ConfigError(f"- {source}: no row is left to train on")
    return Dataset.from_list(encoded)


def encode(row: Row, tokenizer: Any) -> tuple[list[int], list[int]]:
    """(input_ids, labels) of one converted row; raises BadRowError."""
    if "text" in row:
        ids = tokenizer(row["text"])["input_ids"] + [tokenizer.eos_token_id]
        return ids, list(ids)
    if "prompt" in row:
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = tokenizer(row["completion"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        return prompt + answer, [IGNORED] * len(prompt) + answer
    return _encode_chat(row["messages"], tokenizer)


def _encode_chat(messages: list[dict[str, str]], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Assistant turns by rendering prefixes: the turn is what its rendering adds to the rendering that asks for it."""
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRowError("it has no assistant turn to learn from")
    if not tokenizer.chat_template:
        raise ConfigError(
            "- the tokenizer has no chat template; give prompt/completion or text data, or a chat model's tokenizer"
        )
    ids = _render(messages, tokenizer, False)
    labels = [IGNORED] * len(ids)
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _render(messages[:place], tokenizer, True)
        end = _render(messages[: place + 1], tokenizer, False)
        if ids[: len(start)] != start or ids[: len(end)] != end:
            raise BadRowError(
                "the chat template does not render turns one after another, so assistant tokens cannot be told"
            )
        stop = len(end)
        if tokenizer.eos_token_id in end[len(start) :]:
            # What follows the end of the turn (a newline) is the template's, not the model's to say.
            stop = len(end) - end[::-1].index(tokenizer.eos_token_id)
        labels[len(start) : stop] = ids[len(start) : stop]
    return ids, labels


def _render(messages: list[dict[str, str]], tokenizer: Any, ask: bool) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
    return tokenizer(text, add_special_tokens=False)["input_ids"]
