"""The shapes of data people have, each turned into messages or text."""

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
               {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi."}]}
  prompt:      {"prompt": "2+2? ", "completion": "4"}
               {"prompt": [{"role": "user", "content": "2+2?"}], "completion": [{"role": "assistant", "content": "4"}]}
  alpaca:      {"instruction": "Add the numbers.", "input": "2 and 2", "output": "4"}
               {"instruction": "Name a colour.", "input": "", "output": "Red"}
  sharegpt:    {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}
               {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hi."}]}
  text:        {"text": "Any document; every token is trained on."}
               {"text": "Another document."}"""

Row = dict[str, Any]


class BadRowError(ValueError):
    """A row that cannot be used; the message says why."""


def detect(columns: list[str]) -> Callable[[Row], Row]:
    """The converter for data with these columns. It maps a row to {"messages": [...]} or {"prompt", "completion"} or {"text"}.

    Raises ConfigError naming the columns and the accepted shapes (trap P8).
    """
    for needed, convert in (
        ({"messages"}, _messages),
        ({"conversations"}, _sharegpt),
        ({"prompt", "completion"}, _prompt),
        ({"instruction", "output"}, _alpaca),
        ({"text"}, _text),
    ):
        if needed <= set(columns):
            return convert
    raise ConfigError(
        f"- the data has the columns {', '.join(columns) or 'none'}, which is no shape known here.\n{ACCEPTED}"
    )


def _messages(row: Row) -> Row:
    return {"messages": [_turn(turn, "role", "content") for turn in _turns(row["messages"])]}


def _sharegpt(row: Row) -> Row:
    return {"messages": [_turn(turn, "from", "value") for turn in _turns(row["conversations"])]}


def _prompt(row: Row) -> Row:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list):
        return {"messages": [_turn(turn, "role", "content") for turn in [*prompt, *_turns(completion)]]}
    return {"prompt": _words(prompt, "prompt"), "completion": _words(completion, "completion")}


def _alpaca(row: Row) -> Row:
    question = _words(row["instruction"], "instruction")
    if row.get("input"):
        question = f"{question}\n\n{row['input']}"
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": _words(row["output"], "output")},
        ]
    }


def _text(row: Row) -> Row:
    return {"text": _words(row["text"], "text")}


def _turns(turns: Any) -> list[Any]:
    if not isinstance(turns, list) or not turns:
        raise BadRowError("it has no turns")
    return turns


def _turn(turn: Any, role_key: str, text_key: str) -> dict[str, str]:
    if not isinstance(turn, dict) or role_key not in turn or text_key not in turn:
        raise BadRowError(f"a turn lacks {role_key!r} or {text_key!r}")
    role = turn[role_key]
    if role not in _ROLES:
        raise BadRowError(f"a turn has the role {role!r}; known: {', '.join(_ROLES)}")
    return {"role": _ROLES[role], "content": _words(turn[text_key], f"a turn of {_ROLES[role]}")}


def _words(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadRowError(
            f"{what} is empty" if value in (None, "") or isinstance(value, str) else f"{what} is not text"
        )
    return value
