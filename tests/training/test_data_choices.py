"""Which rows are trained on, which are held out, how long they may be, and what is left on the way."""

import json
from pathlib import Path

import pytest

from leantune.errors import ConfigError
from leantune.training.config import build_config
from leantune.training.data.load import PreparedData, examine, load_data
from leantune.training.pretrained import ModelLimits


def texts(folder: Path, name: str, *rows: str) -> str:
    path = folder / name
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return str(path)


def config(dataset: object, **more: object):
    return build_config({"model_name_or_path": "m", "dataset": dataset, **more})


def decoded(rows, tokenizer) -> list[str]:
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in rows["input_ids"]]


def trained(data: PreparedData, tokenizer) -> list[str]:
    return decoded(data.train, tokenizer)


def test_a_list_of_datasets_is_a_mixture_whose_weights_are_rows_an_epoch(tmp_path: Path, tokenizer) -> None:
    first = texts(tmp_path, "a.jsonl", *(f"a{n}" for n in range(4)))
    second = texts(tmp_path, "b.jsonl", *(f"b{n}" for n in range(10)))
    plain = trained(load_data(config([first, second]), tokenizer), tokenizer)
    assert plain == [f"a{n}" for n in range(4)] + [f"b{n}" for n in range(10)]
    data = load_data(config([first, second], dataset_weights=[2.5, 0.3]), tokenizer)
    rows = trained(data, tokenizer)
    assert [rows.count(f"a{n}") for n in range(4)].count(3) == 2 and len(rows) == 13
    assert all(rows.count(f"a{n}") in (2, 3) for n in range(4))
    assert len({row for row in rows if row.startswith("b")}) == 3
    assert [source.taken for source in data.report.sources] == [10, 3]
    again = load_data(config([first, second], dataset_weights=[2.5, 0.3]), tokenizer)
    other = load_data(config([first, second], dataset_weights=[2.5, 0.3], seed=1), tokenizer)
    assert trained(again, tokenizer) == rows != trained(other, tokenizer)


def test_a_weight_that_leaves_no_row_is_told(tmp_path: Path, tokenizer) -> None:
    rows = texts(tmp_path, "a.jsonl", "a", "b")
    with pytest.raises(ConfigError, match=r"dataset_weights: 0.1 of the 2 rows of .*a.jsonl is none"):
        load_data(config(rows, dataset_weights=[0.1]), tokenizer)


def test_rows_held_out_are_never_trained_on_however_a_mixture_is_weighted(tmp_path: Path, tokenizer) -> None:
    first = texts(tmp_path, "a.jsonl", *(f"a{n}" for n in range(10)))
    second = texts(tmp_path, "b.jsonl", *(f"b{n}" for n in range(10)))
    data = load_data(config([first, second], dataset_weights=[3, 1], eval_split=0.3), tokenizer)
    held, kept = set(decoded(data.held_out, tokenizer)), set(trained(data, tokenizer))
    assert len(held) == 6 and len(kept) == 14 and not held & kept


@pytest.mark.parametrize("how", ["eval_dataset", "eval_split"])
def test_a_row_both_trained_on_and_held_out_is_told_and_left_out_of_training(
    tmp_path: Path, tokenizer, how: str
) -> None:
    rows = texts(tmp_path, "d.jsonl", *([f"row {n}" for n in range(4)] * (2 if how == "eval_split" else 1)))
    share = {"eval_split": 0.25, "eval_dataset": texts(tmp_path, "held.jsonl", "row 2", "other")}
    with pytest.raises(ConfigError, match=r"d.jsonl, line \d: it is also held out \(.*line \d\)"):
        load_data(config(rows, **{how: share[how]}), tokenizer)
    data = load_data(config(rows, drop_invalid=True, **{how: share[how]}), tokenizer)
    held, kept = decoded(data.held_out, tokenizer), trained(data, tokenizer)
    assert len(held) == 2 and kept and not set(held) & set(kept)
    assert data.report.sources[0].copies == data.report.dropped > 0


def test_max_length_auto_is_the_99th_percentile_within_the_model_s_positions(tmp_path: Path, tokenizer) -> None:
    rows = texts(tmp_path, "d.jsonl", *(["x" * 99] * 198), "x" * 399, "x" * 499)
    data = load_data(config(rows, max_length="auto"), tokenizer)
    assert data.max_length == 128 and data.longest == 128 and "max_length: auto is 128" in data.notes[0]
    assert sorted({len(ids) for ids in data.train["input_ids"]}) == [100, 128]
    assert data.report.sources[0].cut == 2 and data.report.sources[0].lengths["longest"] == 500
    short = load_data(config(rows, max_length="auto"), tokenizer, ModelLimits(positions=96))
    assert short.max_length == 96
    assert "rows are longer" in load_data(config(rows), tokenizer, ModelLimits(positions=96)).notes[0]
    assert config(rows, max_length="auto") == build_config(
        {"model_name_or_path": "m", "dataset": rows, "max_length": "auto"}
    )
    assert "max_length: auto" in config(rows, max_length="auto").to_yaml()


def test_p7_rows_cut_and_masked_are_counted_before_anything_is_dropped(tmp_path: Path, tokenizer) -> None:
    path = tmp_path / "d.jsonl"
    sizes = ((4, 4), (4, 40), (40, 4), (60, 4))
    path.write_text("".join(json.dumps({"prompt": "x" * p, "completion": "y" * c}) + "\n" for p, c in sizes))
    report = examine(config(str(path), max_length=24, drop_invalid=True), tokenizer).report
    (source,) = report.sources
    assert (source.read, source.cut, source.masked, source.usable) == (4, 3, 2, 2)
    assert [problem.place.line for problem in source.findings.of("row")] == [3, 4]


def test_what_is_dropped_is_written_as_it_was(tmp_path: Path, tokenizer) -> None:
    lines = ['{"prompt": "a ", "completion": "b"}', '{"prompt": "a ", "completion": ""}', '{"broken', '{"text": "c"}']
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join([*lines, json.dumps({"prompt": "x" * 90, "completion": "y"})]) + "\n")
    data = load_data(config(str(path), drop_invalid=True, max_length=32), tokenizer)
    assert trained(data, tokenizer) == ["a b"]
    written = data.report.write_dropped(tmp_path / "out")
    dropped = [json.loads(line) for line in written.read_text().splitlines()]
    assert [row["line"] for row in dropped] == [2, 3, 4, 5]
    assert [row["data"] for row in dropped[:3]] == [json.loads(lines[1]), lines[2], json.loads(lines[3])]
    assert dropped[3]["data"].startswith("xxx") and dropped[0]["field"] == "completion"


def test_notes_name_what_stops_nothing(tmp_path: Path, tokenizer) -> None:
    path = tmp_path / "d.jsonl"
    rows = [
        {"prompt": "a", "completion": "b"},
        {"prompt": "a\n", "completion": "nan"},
        {"prompt": "c\r\n", "completion": "d"},
    ]
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps({**row, "id": 1}).encode() for row in rows))
    tokenizer.chat_template = None
    report = examine(config(str(path)), tokenizer).report
    assert report.clean and len(report.sources[0].findings.of("note")) == 6
    said = "\n".join(report.remarks())
    for words in ("byte-order mark", "as on Windows", "columns id", "carriage returns", "'nan'", "without a space"):
        assert said.count(words) == 1


@pytest.mark.parametrize("columns", ["question,answer", "Instruction,Output", "input;output", "query\tresponse"])
def test_p8_a_table_of_questions_and_answers_in_any_dress_is_a_conversation(
    tmp_path: Path, tokenizer, columns: str
) -> None:
    separator = next(mark for mark in ",;\t" if mark in columns)
    (tmp_path / "d.csv").write_text(f'{columns}\n"Sky, at {separator}noon?"{separator}Blue.\n')
    data = load_data(config(str(tmp_path / "d.csv")), tokenizer)
    row = data.train[0]
    assert tokenizer.decode(row["input_ids"]).startswith(f"<|im_start|>user\nSky, at {separator}noon?<|im_end|>")
    assert tokenizer.decode([label for label in row["labels"] if label != -100]) == "Blue.<|im_end|>"
    tokenizer.chat_template = None
    plain = load_data(config(str(tmp_path / "d.csv")), tokenizer)
    assert tokenizer.decode(plain.train[0]["input_ids"]) == (
        f"### Instruction:\nSky, at {separator}noon?\n\n### Response:\nBlue.<|im_end|>"
    )
    assert any("no chat template" in note for note in plain.notes)


def test_a_file_of_one_row_trains(tmp_path: Path, tokenizer) -> None:
    data = load_data(config(texts(tmp_path, "d.jsonl", "one")), tokenizer)
    assert data.rows == 1 and not data.padded


def test_rows_on_their_way_are_not_held_in_memory(tmp_path: Path, tokenizer, monkeypatch) -> None:
    """500 rows of 400 tokens are 14 MB as lists of Python's integers; a batch here is 8,192 tokens, 0.6 MB."""
    import tracemalloc

    from leantune.training.data import row_stream, token_rows

    path = texts(tmp_path, "d.jsonl", *(f"row {n}" for n in range(500)))
    monkeypatch.setattr(token_rows, "_TOKENS_A_BATCH", 2**13)
    monkeypatch.setattr(row_stream, "encode", lambda row, tokenizer: (list(range(1000, 1400)), list(range(1000, 1400))))
    load_data(config(path), tokenizer)  # what is imported on first use is not counted below
    tracemalloc.start()
    data = load_data(config(path), tokenizer)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert data.rows == 500 and data.train[499]["labels"][-1] == 1399
    assert peak < 2.5e6


def test_reading_goes_on_after_what_a_folder_mixes_and_a_saved_data_set_names_its_rows(
    tmp_path: Path, tokenizer
) -> None:
    from datasets import Dataset

    (tmp_path / "f").mkdir()
    texts(tmp_path / "f", "train-a.jsonl", "a")
    (tmp_path / "f" / "train-b.jsonl").write_text('{"text": "b"}\n{"text": ""}\n')
    with pytest.raises(ConfigError, match=r"1 of 3 rows cannot be used[\s\S]*train-b.jsonl, line 2: text: it is empty"):
        load_data(config(str(tmp_path / "f")), tokenizer)
    Dataset.from_list([{"text": "a"}, {"text": None}]).save_to_disk(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"saved, row 2: text: it is empty"):
        load_data(config(str(tmp_path / "saved")), tokenizer)


def test_a_hub_name_that_cannot_be_read_is_named(monkeypatch, tokenizer) -> None:
    import datasets

    def unreachable(*arguments, **more):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ConfigError) as caught:
        load_data(config("someone/rows:train"), tokenizer)
    assert str(caught.value) == (
        "- dataset 'someone/rows:train' is no file or folder here, and cannot be read from the hub: ConnectionError: "
        "no route to the hub"
    )
    rows = [{"text": "a"}, {"text": "b"}]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split, streaming: datasets.Dataset.from_list(rows))
    assert trained(load_data(config("someone/rows"), tokenizer), tokenizer) == ["a", "b"]
