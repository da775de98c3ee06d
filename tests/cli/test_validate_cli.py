"""leantune validate as a user types it: exit codes, tables, JSON, the file of rows left out; and a csv that trains."""

import json
import sys
from pathlib import Path

import pytest

from leantune import cli

GOOD = {"messages": [{"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "Blue."}]}


def leantune(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["leantune", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def write(path: Path, *lines: str) -> str:
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def test_clean_data_end_with_0_and_show_a_row_with_its_trained_tokens(
    monkeypatch, capsys, tiny_model_path: str, tmp_path: Path
) -> None:
    rows = write(tmp_path / "d.jsonl", *[json.dumps(GOOD)] * 3)
    assert leantune(monkeypatch, "validate", rows, "--model_name_or_path", tiny_model_path) == 0
    shown = capsys.readouterr().out
    assert "messages" in shown and "<|im_start|>assistant\nBlue.<|im_end|>" in shown and "nothing is wrong" in shown


def test_trained_tokens_are_green_and_the_others_dim(tokenizer) -> None:
    from leantune.training.data.encoding import encode
    from leantune.training.data.tables import rendered

    text = rendered(*encode(GOOD, tokenizer), tokenizer)
    parts = {str(span.style): text.plain[span.start : span.end] for span in text.spans}
    assert parts["bold green"] == "Blue.<|im_end|>"
    assert text.plain.startswith("<|im_start|>user\nSky?") and str(text.spans[0].style) == "dim"


def test_problems_end_with_1_in_tables_and_in_json_and_rows_left_out_are_written(
    monkeypatch, capsys, tiny_model_path: str, tmp_path: Path
) -> None:
    rows = write(tmp_path / "d.jsonl", json.dumps(GOOD), "{broken", json.dumps({"messages": []}), '{"text": "a"}')
    run = tmp_path / "run.yaml"
    run.write_text(f"model_name_or_path: {tiny_model_path}\ndataset: {rows}\noutput_dir: {tmp_path / 'out'}\n")
    assert leantune(monkeypatch, "validate", str(run), "--shown", "2") == 1
    shown = capsys.readouterr().out
    for words in ("line 2", "not JSON at column 2", "line 3", "it has no turns", "and 1 more", "problems were found"):
        assert words in shown
    assert "line 4" not in shown and not (tmp_path / "out").exists()
    assert leantune(monkeypatch, "validate", str(run), "--json", "--drop-invalid") == 1
    report = json.loads(capsys.readouterr().out)
    (source,) = report["sources"]
    assert [(problem["line"], problem["field"]) for problem in source["problems"]] == [
        (2, ""),
        (3, "messages"),
        (4, ""),
    ]
    assert (source["read"], source["usable"], report["clean"], report["dropped"]) == (4, 1, False, 3)
    dropped = Path(report["dropped_file"]).read_text().splitlines()
    assert [json.loads(line)["data"] for line in dropped] == ["{broken", {"messages": []}, {"text": "a"}]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.jsonl", "--model_name_or_path", "MODEL"], "there is no file or folder none.jsonl"),
        (["none.yaml"], "no config file none.yaml"),
        (["ROWS"], "model_name_or_path is missing"),
        (["ROWS", "--model_name_or_path", "/no/such/model"], "/no/such/model"),
        (["ROWS", "--model_name_or_path", "MODEL", "--max_lenght", "3"], "did you mean 'max_length'"),
        (["ROWS", "--model_name_or_path", "MODEL", "--shown", "all"], "--shown takes a number, not 'all'"),
    ],
)
def test_bad_input_ends_with_2(monkeypatch, capsys, tiny_model_path: str, tmp_path: Path, arguments, words) -> None:
    known = {"ROWS": write(tmp_path / "d.jsonl", json.dumps(GOOD)), "MODEL": tiny_model_path}
    assert leantune(monkeypatch, "validate", *[known.get(word, word) for word in arguments]) == 2
    told = capsys.readouterr().err
    assert words in told and "Traceback" not in told


def test_a_csv_of_questions_and_answers_and_a_model_folder_train_with_one_command(
    monkeypatch, tiny_model_path: str, tmp_path: Path
) -> None:
    rows = write(tmp_path / "d.csv", "Question;Answer", *(f"What is {n} and {n}?;It is {2 * n}." for n in range(20)))
    flags = ["--dataset", rows, "--output_dir", str(tmp_path / "out"), "--max_length", "auto", "--eval_split", "0.2"]
    more = ["--learning_rate", "1e-3", "--num_train_epochs", "3"]
    assert leantune(monkeypatch, "train", "--model_name_or_path", tiny_model_path, *flags, *more) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["held_out_after"] < summary["held_out_before"]
    assert "max_length: 64" in (tmp_path / "out" / "leantune_config.yaml").read_text()
