"""The shapes of data people have, each turned into messages, a prompt with its completion, or text."""

from collections.abc import Callable
from typing import Any

from leantune.errors import ConfigError

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}

ACCEPTED = """accepted shapes, a row each:
  messages:    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
               {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
                             {"role": "assistant", "content": "Hi."}]}
  prompt:      {"prompt": "2+2? ", "completion": "4"}
               {"prompt": [{"role": "user", "content": "2+2?"}], "completion": [{"role": "assistant", "content": "4"}]}
  alpaca:      {"instruction": "Add the numbers.", "input": "2 and 2", "output": "4"}
               {"instruction": "Name a colour.", "input": "", "output": "Red"}
  sharegpt:    {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}
               {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"},
                                  {"from": "gpt", "value": "Hi."}]}
  text:        {"text": "Any document; every token is trained on."}
               {"text": "Another document."}"""

Row = dict[str, Any]


class BadRowError(ValueError):
    """A row that cannot be used; the message says why."""


def detect(columns: list[str]) -> Callable[[Row], Row]:
    """The converter for data with these columns. It maps a row to {"messages": [...]} or {"prompt", "completion"} or
    {"text"}.

    Raises ConfigError naming the columns and the accepted shapes (trap P8).

    >>> detect(["instruction", "output"])({"instruction": "Name a colour.", "output": "Red"})["messages"][1]
    {'role': 'assistant', 'content': 'Red'}
    """
    return _shape(columns)[1]


def unused_columns(columns: list[str]) -> list[str]:
    """The columns that the detected shape does not read; training goes on without them, so the header names them.

    >>> unused_columns(["id", "prompt", "completion"])
    ['id']
    """
    read = _shape(columns)[0]
    return [column for column in columns if column not in read]


def _shape(columns: list[str]) -> tuple[set[str], Callable[[Row], Row]]:
    """(columns read, converter)."""
    for needed, optional, convert in (
        ({"messages"}, set(), _messages),
        ({"conversations"}, {"system"}, _sharegpt),
        ({"prompt", "completion"}, set(), _prompt),
        ({"instruction", "output"}, {"input", "system"}, _alpaca),
        ({"text"}, set(), _text),
    ):
        if needed <= set(columns):
            return needed | optional, convert
    raise ConfigError(
        f"- the data has the columns {', '.join(columns) or 'none'}, which is no shape known here.\n{ACCEPTED}"
    )


def _messages(row: Row) -> Row:
    return {"messages": _conversation(row["messages"])}


def _sharegpt(row: Row) -> Row:
    return {"messages": _system(row) + _conversation(row["conversations"])}


def _prompt(row: Row) -> Row:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) != isinstance(completion, list):
        raise BadRowError("prompt and completion must both be text, or both be lists of messages")
    if not isinstance(prompt, list):
        return {"prompt": _words(prompt, "prompt"), "completion": _words(completion, "completion")}
    asked, answer = _conversation(prompt), _conversation(completion)
    if any(turn["role"] != "assistant" for turn in answer[:1]):
        raise BadRowError("completion does not begin with an assistant turn")
    # Assistant turns of the prompt are examples to read, not answers to learn.
    return {"messages": asked + answer, "learnt_from": len(asked)}


def _alpaca(row: Row) -> Row:
    question = _words(row["instruction"], "instruction")
    if str(row.get("input") or "").strip():
        question = f"{question}\n\n{_words(row['input'], 'input')}"
    answer = {"role": "assistant", "content": _words(row["output"], "output")}
    return {"messages": [*_system(row), {"role": "user", "content": question}, answer]}


def _text(row: Row) -> Row:
    return {"text": _words(row["text"], "text")}


def _system(row: Row) -> list[dict[str, str]]:
    """The system turn of a column of that name, if it holds one."""
    return [{"role": "system", "content": _words(row["system"], "system")}] if row.get("system") else []


def _conversation(turns: Any) -> list[dict[str, str]]:
    """Turns under role/content or from/value; an empty system turn says nothing and is left out."""
    if not isinstance(turns, list) or not turns:
        raise BadRowError("it has no turns")
    converted = []
    for turn in turns:
        role, content = _role_and_content(turn)
        if role != "system" or (isinstance(content, str) and content.strip()):
            converted.append({"role": role, "content": _words(content, f"a turn of {role}")})
    if not converted:
        raise BadRowError("it has no turns")
    return converted


def _role_and_content(turn: Any) -> tuple[str, Any]:
    for role_key, text_key in (("role", "content"), ("from", "value")):
        if isinstance(turn, dict) and turn.get(role_key) is not None:
            if turn[role_key] not in _ROLES:
                raise BadRowError(f"a turn has the role {turn[role_key]!r}; known: {', '.join(_ROLES)}")
            return _ROLES[turn[role_key]], turn.get(text_key)
    raise BadRowError("a turn lacks 'role' and 'content' (or 'from' and 'value')")


def _words(value: Any, what: str) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise BadRowError(f"{what} is empty")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise BadRowError(f"{what} is {value!r}, not text; write it in quotes")
    return value
