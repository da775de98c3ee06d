"""Rows read while training asks for them: in another order each pass, the same when resumed, stopped by a bad one."""

import functools
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_runs import tiny_config, without_pictures, write_rows
from transformers import AutoModelForCausalLM

from leantune.errors import ConfigError, StateMismatchError
from leantune.training import run as run_module
from leantune.training.data import load as data_module
from leantune.training.data import streaming
from leantune.training.data.load import load_data
from leantune.training.run import train

QUIET = Console(quiet=True)
config = functools.partial(tiny_config, max_length=64, save_steps=4, max_steps=7, streaming=True, save_total_limit=9)


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)
    monkeypatch.setattr(run_module, "plan_of_run", lambda *arguments: None)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_a_stream_holds_the_rows_that_reading_at_once_does_in_another_order_each_pass(
    tmp_path: Path, tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "SHUFFLED_TOGETHER", 7)
    rows = write_rows(tmp_path, 20)
    whole = load_data(config("m", rows, tmp_path, streaming=False), tokenizer).train.to_list()
    stream = load_data(config("m", rows, tmp_path), tokenizer)
    seen = list(itertools.islice(stream.train, 40))
    epochs = [seen[:20], seen[20:]]
    by_ids = {tuple(row["input_ids"]): row["labels"] for row in whole}
    for seen in epochs:
        assert len(seen) == 20 and {tuple(row["input_ids"]): row["labels"] for row in seen} == by_ids
    assert epochs[0] != epochs[1] and stream.rows is None


@pytest.mark.parametrize("packing", [False, True])
def test_p13_a_streamed_run_resumed_in_its_second_pass_continues_bit_for_bit(
    tiny_model_path: str, tmp_path: Path, packing: bool
) -> None:
    """12 rows, 4 a step (packed: 4 rows of up to 64 tokens): the run goes on from step 4."""
    rows, out = write_rows(tmp_path, 12), tmp_path / "whole"
    train(config(tiny_model_path, rows, out, packing=packing), console=QUIET)
    shutil.copytree(out, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "broken" / "checkpoint-7")
    train(config(tiny_model_path, rows, tmp_path / "broken", packing=packing, resume=True), console=QUIET)
    expected, resumed = weights(out), weights(tmp_path / "broken")
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    with Path(rows).open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    with pytest.raises(StateMismatchError, match="rows are others"):
        train(config(tiny_model_path, rows, out, packing=packing, resume=True, max_steps=9), console=QUIET)


def test_a_row_that_cannot_be_used_stops_a_stream_when_it_comes_or_is_dropped(
    tmp_path: Path, tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "STREAMED_AHEAD", 5)
    path = Path(write_rows(tmp_path, 8))
    path.write_text(path.read_text() + '{"text": ""}\n{"text": "last"}\n')
    stream = load_data(config("m", str(path), tmp_path / "out"), tokenizer).train
    with pytest.raises(ConfigError, match=r"rows.jsonl, line 9: text: it is empty.*drop_invalid: true"):
        list(itertools.islice(stream, 10))
    dropping = load_data(config("m", str(path), tmp_path / "out", drop_invalid=True), tokenizer).train
    assert len({tuple(row["input_ids"]) for row in itertools.islice(dropping, 27)}) == 9
    (row,) = (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()
    assert json.loads(row)["line"] == 9
    path.write_text('{"text": ""}\n')
    with pytest.raises(ConfigError, match="no row is left to train on"):
        next(iter(dropping))


def test_what_is_wrong_at_the_beginning_of_a_stream_is_told_before_training(tmp_path: Path, tokenizer) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "a"}\n{"text": 1.5}\n')
    with pytest.raises(ConfigError, match=r"line 2: text: it is 1\.5, not text"):
        load_data(config("m", str(path), tmp_path), tokenizer)
