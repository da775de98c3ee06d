"""Every shape of data trains on the right tokens; what cannot be used is named by row."""

import json
import re
from pathlib import Path

import pytest

from leantune.errors import ConfigError
from leantune.training.config import TrainConfig
from leantune.training.data.encoding import encode
from leantune.training.data.load import load_data
from leantune.training.data.problems import BadRowError
from leantune.training.data.shapes import detect


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
        detect(["title", "body"])
    assert "'title', 'body'" in str(caught.value)
    for shape in ("messages", "prompt", "alpaca", "question", "sharegpt", "text"):
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
    for words in ("3 of 4 rows", "line 2: it has no assistant turn", "line 3", "line 4: nothing is left to learn"):
        assert words in str(caught.value)
    kept = load_data(TrainConfig(dataset=config.dataset, max_length=64, drop_invalid=True), tokenizer)
    assert len(kept.train) == 1 and "dropped 3 of 4" in kept.notes[0]


def test_p7_rows_cut_at_max_length_are_counted(tmp_path: Path, tokenizer) -> None:
    rows = [{"text": "x" * 10}, {"text": "x" * 50}, {"text": "x" * 100}]
    data = load_data(TrainConfig(dataset=write(tmp_path / "d.jsonl", rows), max_length=32), tokenizer)
    assert [len(ids) for ids in data.train["input_ids"]] == [11, 32, 32]
    assert "2 of 3 rows are longer than max_length 32 (the longest: 101 tokens)" in data.notes[0]


def test_p7_cells_of_a_csv_file_are_text(tmp_path: Path, tokenizer) -> None:
    (tmp_path / "d.csv").write_text("prompt,completion\na,2.50\nb,007\nc,None\nd,NA\n")
    data = load_data(TrainConfig(dataset=str(tmp_path / "d.csv")), tokenizer)
    answers = [tokenizer.decode([label for label in labels[:-1] if label != -100]) for labels in data.train["labels"]]
    assert answers == ["2.50", "007", "None", "NA"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("d.jsonl", '{"text": "fine"}\n{"text": "caf\xe9"}\n'.encode("latin-1"), "line 2: byte 0xe9 is not UTF-8"),
        ("d.jsonl", b"\n  \n\n", "only blank lines"),
        ("d.csv", b"prompt,completion\n", "holds no rows"),
        ("d.jsonl", b'{"text": 2.5}\n', "line 1: text: it is 2.5, not text"),
        ("d.jsonl", b'{"text": " "}\n', "line 1: text: it is empty"),
    ],
)
def test_p7_files_that_cannot_be_used_say_why(tmp_path: Path, tokenizer, name, content, words) -> None:
    (tmp_path / name).write_bytes(content)
    config = TrainConfig(dataset=str(tmp_path / name), drop_invalid=True)
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        load_data(config, tokenizer)
    assert str(caught.value).startswith((f"- dataset: {tmp_path}", f"- dataset '{tmp_path}", f"- {tmp_path}"))
    good = write(tmp_path / "good.jsonl", [{"text": "fine"}])
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_data(TrainConfig(dataset=good, eval_dataset=config.dataset, drop_invalid=True), tokenizer)


def test_a_split_is_held_out_and_files_that_are_not_there_are_named(tmp_path: Path, tokenizer) -> None:
    rows = [{"text": f"Line {number}."} for number in range(10)]
    data = load_data(TrainConfig(dataset=write(tmp_path / "d.jsonl", rows), eval_split=0.3), tokenizer)
    assert (len(data.train), len(data.held_out)) == (7, 3)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "x.docx").touch()
    for name in ("none.jsonl", "empty.jsonl", "x.docx"):
        with pytest.raises(ConfigError, match=name):
            load_data(TrainConfig(dataset=str(tmp_path / name)), tokenizer)


def test_p15_a_system_column_and_empty_system_turns(tokenizer) -> None:
    turns = [{"from": "system", "value": ""}, {"from": "human", "value": "Sky?"}, {"from": "gpt", "value": "Blue."}]
    row = {"conversations": turns, "system": "Be brief."}
    assert [turn["role"] for turn in detect(list(row))(row)["messages"]] == ["system", "user", "assistant"]
    trl_style = {"conversations": [{"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "Blue."}]}
    assert trained_text(trl_style, tokenizer) == "Blue.<|im_end|>"
    with pytest.raises(BadRowError, match="role 'narrator'"):
        detect(["conversations"])({"conversations": [{"from": "narrator", "value": "Once."}]})


def test_p16_marks_of_the_template_decide_and_the_end_of_the_turn_is_learnt(tokenizer) -> None:
    twice = [*CHAT, {"role": "user", "content": "Grass?"}, {"role": "assistant", "content": "Green."}]
    wanted = trained_text({"messages": twice}, tokenizer)
    plain = encode({"messages": twice}, tokenizer)[0]
    said = "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\\n' }}"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
        "{% if m['role'] == 'assistant' %}"
        + said
        + "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    )
    assert trained_text({"messages": twice}, tokenizer) == wanted == "Blue.<|im_end|>Green.<|im_end|>"
    assert encode({"messages": twice}, tokenizer)[0] == plain


def test_p16_assistant_turns_inside_a_prompt_are_read_not_learnt(tokenizer) -> None:
    row = {
        "prompt": [*CHAT, {"role": "user", "content": "Grass?"}],
        "completion": [{"role": "assistant", "content": "Green."}],
    }
    assert trained_text(row, tokenizer) == "Green.<|im_end|>"


def test_p16_templates_whose_turns_cannot_be_told_are_refused(tokenizer) -> None:
    whole = tokenizer.chat_template
    tokenizer.chat_template = whole.replace("<|im_start|>assistant", "<|im_start|>assistant <think>")
    with pytest.raises(BadRowError, match="generation prompt"):
        encode({"messages": CHAT}, tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no system turns') }}" + whole
    with pytest.raises(BadRowError, match="no system turns"):
        encode({"messages": CHAT}, tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        encode({"messages": CHAT}, tokenizer)


def test_special_tokens_stand_once(tokenizer) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer.add_special_tokens({"bos_token": "<|im_start|>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    for row in (
        {"text": "Sky"},
        {"text": "<|im_start|>Sky"},
        {"text": "Sky<|im_end|>"},
        {"prompt": "S", "completion": "ky"},
    ):
        ids, labels = encode(row, tokenizer)
        assert ids.count(1) == 1 and ids[0] == 1 and ids.count(2) == 1 and ids[-1] == labels[-1] == 2
    ids, _ = encode({"messages": CHAT}, tokenizer)
    assert ids.count(1) == 3 and ids.count(2) == 3


def test_every_kind_of_file_and_a_folder_give_the_same_rows(tmp_path: Path, tokenizer) -> None:
    from datasets import Dataset

    rows = Dataset.from_list([{"prompt": f"{n}+1=", "completion": str(n + 1), "id": n} for n in range(3)])
    folder = tmp_path / "folder"
    folder.mkdir()
    rows.to_json(tmp_path / "d.jsonl")
    rows.to_csv(tmp_path / "d.csv")
    rows.to_parquet(tmp_path / "d.parquet")
    (tmp_path / "d.json").write_text(json.dumps(rows.to_list()))
    rows.to_json(folder / "train.jsonl")
    rows.select([0]).to_json(folder / "test.jsonl")
    rows.save_to_disk(str(tmp_path / "saved"))
    seen = []
    for name in ("d.jsonl", "d.json", "d.csv", "d.parquet", "folder", "saved"):
        data = load_data(TrainConfig(dataset=str(tmp_path / name)), tokenizer)
        assert "not used: the columns id" in data.notes[0]
        seen.append(data.train.to_list())
    assert len(seen[0]) == 3 and all(rows == seen[0] for rows in seen)
    (folder / "more.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="mixes"):
        load_data(TrainConfig(dataset=str(folder)), tokenizer)


def test_p9_packed_rows_do_not_see_one_another(tiny_model_path: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows = [{"input_ids": list(range(10, 17))}, {"input_ids": list(range(40, 45))}]
    packed = {"input_ids": rows[0]["input_ids"] + rows[1]["input_ids"], "seq_lengths": [7, 5]}
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([packed])
    assert batch["position_ids"].tolist() == [[*range(7), *range(5)]] and batch["labels"][0, 7] == -100
    for attention in ("sdpa", "eager"):
        model = AutoModelForCausalLM.from_pretrained(
            tiny_model_path, dtype=torch.float32, attn_implementation=attention
        ).eval()
        with torch.no_grad():
            together = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[
                0
            ]
            alone = [model(input_ids=torch.tensor([row["input_ids"]])).logits[0] for row in rows]
        torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-5)
