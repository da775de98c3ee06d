"""Every shape of data trains on the right tokens; what cannot be used is named by row."""

import json
from pathlib import Path

import pytest

from leantune.errors import ConfigError
from leantune.training.config import TrainConfig
from leantune.training.data import encode, load_data
from leantune.training.shapes import detect


def trained_text(row: dict, tokenizer) -> str:
    ids, labels = encode(detect(list(row))(row), tokenizer)
    assert len(ids) == len(labels)
    return tokenizer.decode([token for token, label in zip(ids, labels, strict=True) if label != -100])


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Sky?"},
    {"role": "assistant", "content": "Blue."},
]


def test_p16_chat_trains_on_assistant_turns_and_their_end(tokenizer) -> None:
    twice = [*CHAT, {"role": "user", "content": "Grass?"}, {"role": "assistant", "content": "Green."}]
    assert trained_text({"messages": twice}, tokenizer) == "Blue.<|im_end|>Green.<|im_end|>"


def test_p15_sharegpt_roles_become_user_and_assistant(tokenizer) -> None:
    turns = [{"from": "human", "value": "Sky?"}, {"from": "gpt", "value": "Blue."}]
    converted = detect(["conversations"])({"conversations": turns})
    assert [turn["role"] for turn in converted["messages"]] == ["user", "assistant"]
    assert trained_text({"conversations": turns}, tokenizer) == "Blue.<|im_end|>"


def test_prompts_alpaca_and_text(tokenizer) -> None:
    assert trained_text({"prompt": "2+2? ", "completion": "4"}, tokenizer) == "4<|im_end|>"
    assert trained_text({"prompt": CHAT[:2], "completion": CHAT[2:]}, tokenizer) == "Blue.<|im_end|>"
    assert trained_text({"instruction": "Add.", "input": "2 and 2", "output": "4"}, tokenizer) == "4<|im_end|>"
    assert trained_text({"text": "All of it."}, tokenizer) == "All of it.<|im_end|>"


def test_p8_unknown_columns_are_named_with_the_accepted_shapes() -> None:
    with pytest.raises(ConfigError) as caught:
        detect(["question", "answer"])
    assert "question, answer" in str(caught.value)
    for shape in ("messages", "prompt", "alpaca", "sharegpt", "text"):
        assert f"{shape}:" in str(caught.value)


def test_p7_bad_rows_are_named_and_dropped_only_when_told(tmp_path: Path, tokenizer) -> None:
    rows = [
        {"messages": CHAT},
        {"messages": CHAT[:2]},
        {"messages": [*CHAT[:2], {"role": "assistant", "content": " "}]},
    ]
    rows += [{"messages": [{"role": "user", "content": "x" * 400}, CHAT[2]]}]
    config = TrainConfig(model_name_or_path="m", dataset=write(tmp_path / "d.jsonl", rows), max_length=64)
    with pytest.raises(ConfigError) as caught:
        load_data(config, tokenizer)
    for words in ("3 of 4 rows", "row 2: it has no assistant turn", "row 3", "row 4: nothing is left to learn"):
        assert words in str(caught.value)
    kept = load_data(TrainConfig(dataset=config.dataset, max_length=64, drop_invalid=True), tokenizer)
    assert len(kept.train) == 1 and "dropped 3 of 4" in kept.notes[0]


def test_a_split_is_held_out_and_files_that_are_not_there_are_named(tmp_path: Path, tokenizer) -> None:
    rows = [{"text": f"Line {number}."} for number in range(10)]
    data = load_data(TrainConfig(dataset=write(tmp_path / "d.jsonl", rows), eval_split=0.3), tokenizer)
    assert (len(data.train), len(data.held_out)) == (7, 3)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "x.docx").touch()
    for name in ("none.jsonl", "empty.jsonl", "x.docx"):
        with pytest.raises(ConfigError, match=name):
            load_data(TrainConfig(dataset=str(tmp_path / name)), tokenizer)
