"""Conversations as token ids, with labels on what the assistant says and on the token that ends its turn."""

import re
from typing import Any

from leantune.errors import ConfigError
from leantune.training.data.problems import BadRowError

IGNORED = -100
_MARKERS = re.compile(r"\{%-?\s*generation\b")


def encode_chat(messages: list[dict[str, str]], tokenizer: Any, learnt_from: int = 0) -> tuple[list[int], list[int]]:
    """(input_ids, labels) of a conversation rendered with the tokenizer's chat template.

    Where the template marks what the assistant says ({% generation %}), the marks decide. Elsewhere a turn is what it
    adds to the rendering, with the generation prompt, of all turns before it; both must be true prefixes of the whole,
    token by token.

    Args:
        messages: turns with ``role`` (system, user, assistant) and ``content``.
        learnt_from: assistant turns before this index are read, not learnt.
    Returns: two lists of one length; -100 in ``labels`` where nothing is learnt.
    Raises: BadRowError where the row cannot be used; ConfigError where the tokenizer has no chat template.
    """
    if not any(message["role"] == "assistant" for message in messages[learnt_from:]):
        raise BadRowError("it has no assistant turn to learn from", fix="add the answer, or leave the row out")
    if not tokenizer.chat_template:
        raise ConfigError(
            "- the tokenizer has no chat template; give prompt/completion or text data, or a chat model's tokenizer"
        )
    if learnt_from == 0 and isinstance(tokenizer.chat_template, str) and _MARKERS.search(tokenizer.chat_template):
        return _by_markers(messages, tokenizer)
    ids = _render(messages, tokenizer, ask=False)
    labels = [IGNORED] * len(ids)
    for place in range(learnt_from, len(messages)):
        if messages[place]["role"] != "assistant":
            continue
        start = _render(messages[:place], tokenizer, ask=True)
        end = _render(messages[: place + 1], tokenizer, ask=False)
        if ids[: len(start)] != start or ids[: len(end)] != end:
            raise BadRowError(
                f"turn {place + 1} cannot be told from what surrounds it: the chat template changes earlier turns, or "
                "does not begin an answer with its generation prompt, or a token spans the border (an answer beginning "
                "with a blank line)",
                fix="give prompt/completion rows, or a template with {% generation %} marks",
            )
        labels[len(start) : len(end)] = ids[len(start) : len(end)]
        _trim(labels, len(start), len(end), tokenizer.eos_token_id)
    return ids, labels


def _trim(labels: list[int], start: int, end: int, eos: int | None) -> None:
    """Unlearn what follows the token that ends the turn (a newline): the template's, not the model's to say."""
    if eos in labels[start:end]:
        last = max(place for place in range(start, end) if labels[place] == eos)
        labels[last + 1 : end] = [IGNORED] * (end - last - 1)


def _by_markers(messages: list[dict[str, str]], tokenizer: Any) -> tuple[list[int], list[int]]:
    try:
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception as error:
        raise _refused(error) from error
    ids, mask = list(rendered["input_ids"]), list(rendered["assistant_masks"])
    for place in range(1, len(ids)):
        # Some templates close the mark before the end of the turn, and the model would never learn to stop.
        if mask[place - 1] and not mask[place] and ids[place] == tokenizer.eos_token_id != ids[place - 1]:
            mask[place] = 1
    if not any(mask):
        raise BadRowError("the chat template's {% generation %} marks cover nothing of it")
    return ids, [token if marked else IGNORED for token, marked in zip(ids, mask, strict=True)]


def _render(messages: list[dict[str, str]], tokenizer: Any, ask: bool) -> list[int]:
    """Token ids of the rendering; the template writes BOS itself, so none is added."""
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
    except Exception as error:
        raise _refused(error) from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _refused(error: Exception) -> Exception:
    """Templates refuse conversations (roles must alternate, no system turn) with errors of jinja2."""
    from jinja2 import TemplateError

    if isinstance(error, TemplateError | IndexError | KeyError | TypeError):
        return BadRowError(f"the chat template refuses it: {error}", fix="change its turns, or the template")
    return error
