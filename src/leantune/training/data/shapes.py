"""The shapes of data people have, each turned into messages, a prompt with its completion, or text."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from leantune.errors import ConfigError
from leantune.training.data.problems import BadRowError

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}

ACCEPTED = """accepted shapes, a row each (column names in any case):
  messages:    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
               {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
                             {"role": "assistant", "content": "Hi."}]}
  sharegpt:    {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}
               {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"},
                                  {"from": "gpt", "value": "Hi."}]}
  prompt:      {"prompt": "2+2? ", "completion": "4"}
               {"prompt": [{"role": "user", "content": "2+2?"}], "completion": [{"role": "assistant", "content": "4"}]}
  alpaca:      {"instruction": "Add the numbers.", "input": "2 and 2", "output": "4"}
               {"instruction": "Name a colour.", "output": "Red"}
  question:    {"question": "What is 2+2?", "answer": "4"}
               {"question": "Who wrote it?", "context": "Emma is by Jane Austen.", "answer": "Jane Austen"}
               (also input/output, query, prompt or user with response, instruction with response or answer)
  text:        {"text": "Any document; every token is trained on."}
               {"text": "Another document."}"""

Row = dict[str, Any]
_FILL_IN = "fill it in, or leave the row out"


@dataclass(frozen=True)
class Shape:
    """One way in which rows are written: which columns it reads, and what it makes of a row.

    ``convert`` gives {"messages": [...]}, {"prompt", "completion"} or {"text"}. Messages of one question and its answer
    have ``"asked_once": True``: they can be written without a chat template.
    """

    name: str
    read: frozenset[str]
    convert: Callable[[Row], Row]


def detect(columns: list[str]) -> Callable[[Row], Row]:
    """The converter for data with these columns.

    Raises ConfigError naming the columns and the accepted shapes (trap P8).

    >>> detect(["instruction", "output"])({"instruction": "Name a colour.", "output": "Red"})["messages"][1]
    {'role': 'assistant', 'content': 'Red'}
    """
    shape = shape_of(tuple(columns))
    if shape is None:
        raise ConfigError(f"- the data have {unknown_columns(columns)}.\n{ACCEPTED}")
    return shape.convert


def unknown_columns(columns: list[str]) -> str:
    """ "the columns a, b, which are no shape known here", for messages."""
    named = f"the columns {', '.join(map(repr, columns))}, which are" if columns else "no columns, which is"
    return f"{named} no shape known here"


@lru_cache(maxsize=256)
def shape_of(columns: tuple[str, ...]) -> Shape | None:
    """The shape of rows with these columns, whatever their case; None where it is none of those known.

    >>> shape_of(("Question", "Answer")).name
    'question'
    """
    names: dict[str, str] = {}
    for column in columns:
        names.setdefault(str(column).strip().lower(), column)
    for name, needed, optional, convert in _SHAPES:
        if set(needed) <= set(names):
            used = {key: names[key] for key in (*needed, *optional) if key in names}
            return Shape(name, frozenset(used.values()), _under_canonical_names(convert, used))
    return None


def _under_canonical_names(convert: Callable[[Row], Row], used: dict[str, str]) -> Callable[[Row], Row]:
    def converted(row: Row) -> Row:
        return convert({name: row.get(column) for name, column in used.items()})

    return converted


# --- the converters ---------------------------------------------------------------------------------------------------


def _messages(row: Row) -> Row:
    return {"messages": _conversation(row["messages"], "messages")}


def _sharegpt(row: Row) -> Row:
    return {"messages": _system(row) + _conversation(row["conversations"], "conversations")}


def _prompt(row: Row) -> Row:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) != isinstance(completion, list):
        raise BadRowError(
            "one of prompt and completion is a list", fix="write both as text, or both as lists of messages"
        )
    if not isinstance(prompt, list):
        return {"prompt": _words(prompt, "prompt"), "completion": _words(completion, "completion")}
    asked, answer = _conversation(prompt, "prompt"), _conversation(completion, "completion")
    if any(turn["role"] != "assistant" for turn in answer[:1]):
        raise BadRowError("it does not begin with an assistant turn", "completion", "put what comes before into prompt")
    # Assistant turns of the prompt are examples to read, not answers to learn.
    return {"messages": asked + answer, "learnt_from": len(asked)}


def _asked_once(ask: str, reply: str) -> Callable[[Row], Row]:
    """The converter of a question in column ``ask`` and its answer in ``reply``; input and context follow the
    question."""

    def converted(row: Row) -> Row:
        question = _words(row[ask], ask)
        for more in ("input", "context"):
            if more not in (ask, reply) and str(row.get(more) or "").strip():
                question = f"{question}\n\n{_words(row[more], more)}"
        answer = {"role": "assistant", "content": _words(row[reply], reply)}
        return {"messages": [*_system(row), {"role": "user", "content": question}, answer], "asked_once": True}

    return converted


def _text(row: Row) -> Row:
    return {"text": _words(row["text"], "text")}


def _pair(name: str, ask: str, reply: str) -> tuple[str, tuple[str, ...], tuple[str, ...], Callable[[Row], Row]]:
    return name, (ask, reply), ("input", "context", "system"), _asked_once(ask, reply)


# The first whose needed columns are there is taken.
_SHAPES: list[tuple[str, tuple[str, ...], tuple[str, ...], Callable[[Row], Row]]] = [
    ("messages", ("messages",), (), _messages),
    ("sharegpt", ("conversations",), ("system",), _sharegpt),
    ("prompt", ("prompt", "completion"), (), _prompt),
    _pair("alpaca", "instruction", "output"),
    _pair("alpaca", "instruction", "response"),
    _pair("alpaca", "instruction", "answer"),
    _pair("question", "question", "answer"),
    _pair("question", "question", "response"),
    _pair("question", "query", "response"),
    _pair("question", "query", "answer"),
    _pair("question", "prompt", "response"),
    _pair("question", "user", "assistant"),
    _pair("question", "input", "output"),
    ("text", ("text",), (), _text),
]


def _system(row: Row) -> list[dict[str, str]]:
    """The system turn of a column of that name, if it holds one."""
    return [{"role": "system", "content": _words(row["system"], "system")}] if row.get("system") else []


def _conversation(turns: Any, column: str) -> list[dict[str, str]]:
    """Turns under role/content or from/value; an empty system turn says nothing and is left out."""
    if isinstance(turns, str) and turns.strip():
        raise BadRowError("it is text where a list of turns belongs", column, "a csv cell holds no turns: write jsonl")
    if not isinstance(turns, list) or not turns:
        raise BadRowError("it has no turns", column, _FILL_IN)
    converted = []
    for number, turn in enumerate(turns):
        role, text_key, content = _role_and_content(turn, f"{column}[{number}]")
        if role != "system" or not isinstance(content, str) or content.strip():
            where = f"{column}[{number}].{text_key}"
            converted.append({"role": role, "content": _words(content, where, f"a turn of {role}")})
    if not converted:
        raise BadRowError("it has no turns", column, _FILL_IN)
    return converted


def _role_and_content(turn: Any, where: str) -> tuple[str, str, Any]:
    for role_key, text_key in (("role", "content"), ("from", "value")):
        if isinstance(turn, dict) and turn.get(role_key) is not None:
            role = turn[role_key]
            known = _ROLES.get(role.strip().lower()) if isinstance(role, str) else None
            if known is None:
                raise BadRowError(f"it has the role {role!r}", f"{where}.{role_key}", f"known: {', '.join(_ROLES)}")
            return known, text_key, turn.get(text_key)
    raise BadRowError("it lacks a role", where, 'write {"role": "user", "content": "..."}, or from and value')


def _words(value: Any, column: str, what: str = "it") -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise BadRowError(f"{what} is empty", column, _FILL_IN)
    if isinstance(value, float) and math.isnan(value):
        raise BadRowError(f"{what} is NaN, a value that was missing when the file was written", column, _FILL_IN)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        fix = "give its parts as one text" if isinstance(value, list | dict) else "write it in quotes"
        raise BadRowError(f"{what} is {shown}, not text", column, fix)
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            half = value[error.start]
            fix = "write the whole pair, or leave it out"
            raise BadRowError(f"it holds half a character ({ascii(half)[1:-1]})", column, fix) from None
    return value
