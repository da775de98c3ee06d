"""One converted row as token ids and labels: what is trained on is decided here."""

from typing import Any

from leantune.errors import ConfigError
from leantune.training.data.chat import IGNORED, encode_chat
from leantune.training.data.problems import BadRowError
from leantune.training.data.shapes import Row


def encode(row: Row, tokenizer: Any) -> tuple[list[int], list[int]]:
    """(input_ids, labels) of one converted row, before truncation.

    Chat trains on assistant turns and the token that ends them, prompt/completion on the completion, text on
    everything. A question with its answer is written in `plain` form where the tokenizer has no chat template.

    Raises BadRowError where the row cannot be used, ConfigError where the tokenizer cannot be.
    """
    if "messages" in row:
        if tokenizer.chat_template or not row.get("asked_once"):
            return encode_chat(row["messages"], tokenizer, row.get("learnt_from", 0))
        row = plain(row["messages"])
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


def plain(messages: list[dict[str, str]]) -> Row:
    """Prompt and completion of a question and its answer, for a tokenizer without a chat template.

    >>> plain([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])["prompt"]
    '### Instruction:\\n2+2?\\n\\n### Response:\\n'
    """
    system = "".join(f"{turn['content']}\n\n" for turn in messages if turn["role"] == "system")
    question = "\n\n".join(turn["content"] for turn in messages if turn["role"] == "user")
    prompt = f"{system}### Instruction:\n{question}\n\n### Response:\n"
    return {"prompt": prompt, "completion": messages[-1]["content"]}


def check_ids(ids: list[int], tokenizer: Any, embedding_rows: int | None) -> None:
    """Raise BadRowError where ids are not what the model should see: two BOS in a row, or ids without an embedding."""
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        fix = f"leave {tokenizer.bos_token} out of the text: the tokenizer or its template writes one"
        raise BadRowError("it begins with two BOS tokens", fix=fix)
    if embedding_rows is not None and ids and max(ids) >= embedding_rows:
        worst = max(ids)
        raise BadRowError(
            f"token id {worst} ({tokenizer.convert_ids_to_tokens(worst)!r}) is beyond the model's {embedding_rows} "
            "embeddings",
            fix="give the model its own tokenizer, or enlarge it with resize_token_embeddings and save both",
        )


def trained_from(labels: list[int]) -> int | None:
    """The first place at which something is learnt (place 0 never is: nothing predicts it), or None.

    >>> trained_from([-100, -100, 7, 8]), trained_from([5, -100])
    (2, None)
    """
    return next((place for place, label in enumerate(labels) if place and label != IGNORED), None)


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
