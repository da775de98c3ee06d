"""Answers during a run: what is asked, when an answer has ended, what is written; nothing else changes."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tiny_runs import tiny_config, without_pictures, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from leantune.errors import ConfigError
from leantune.training.run import train
from leantune.training.samples import Prompt, Sample, Sampler, answers, end_tokens, split_row, stopped_share

QUIET = Console(quiet=True)


@pytest.mark.parametrize(
    ("labels", "prompt", "reference"),
    [
        ([-100, -100, -100, 4, 5, 6], [1, 2, 3], [4, 5, 6]),
        ([-100, -100, 3, 4, -100, 6], [1, 2], [3, 4]),  # the first of two turns
        ([-100, 2, 3, 4, 5, 6], [1, 2, 3], [4, 5, 6]),  # text after BOS
    ],
)
def test_a_prompt_is_what_comes_before_the_first_learnt_token(
    labels: list[int], prompt: list[int], reference: list[int]
) -> None:
    assert split_row([1, 2, 3, 4, 5, 6], labels) == Prompt(prompt, reference)


@pytest.mark.parametrize("length", [1, 2, 3, 100])
def test_text_of_any_length_gives_a_prompt(length: int) -> None:
    ids = list(range(length))
    found = split_row(ids, ids)
    assert 1 <= len(found.ids) <= 16 and found.ids + found.reference == ids


def test_answers_in_a_padded_batch_are_those_of_prompts_alone(tiny_model_path: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32).train()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    prompts = [Prompt(list(range(10, 10 + length)), []) for length in (3, 9, 5)]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    together = answers(model, prompts, tokenizer, 6, batch_size=2)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert together == [answers(model, [prompt], tokenizer, 6, batch_size=1)[0] for prompt in prompts]
    tokens = torch.tensor(prompts[0].ids)
    for token in together[0]:
        assert token == int(model(tokens[None]).logits[0, -1].argmax())
        tokens = torch.cat([tokens, torch.tensor([token])])


def test_an_answer_is_cut_after_the_token_that_ends_it(tiny_model_path: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    prompt = Prompt([10, 11, 12], [])
    (free,) = answers(model, [prompt], tokenizer, 6, 1)
    model.generation_config.eos_token_id = [free[2], 7]  # the model now ends there
    assert end_tokens(model, tokenizer) == {free[2], 7, tokenizer.eos_token_id}
    assert answers(model, [prompt, Prompt([10], [])], tokenizer, 6, 2)[0] == free[: free.index(free[2]) + 1]


def test_a_run_that_samples_trains_as_one_that_does_not(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pictures(monkeypatch)
    rows = write_rows(tmp_path, 12)
    config = {"max_length": 32, "max_steps": 4, "eval_split": 0.25, "velora_target_modules": ["down_proj"]}
    said = io.StringIO()
    more = {**config, "num_samples": 2, "sample_every": 2, "sample_tokens": 5}
    sampled = train(tiny_config(tiny_model_path, rows, tmp_path / "a", **more), console=Console(file=said, width=200))
    plain = train(tiny_config(tiny_model_path, rows, tmp_path / "b", **config), console=QUIET)
    assert [row.get("loss") for row in sampled.log] == [row.get("loss") for row in plain.log]
    lines = [json.loads(line) for line in (tmp_path / "a" / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 2, 4, 4]
    assert all(line["prompt"].startswith("Row") and line["tokens"] <= 5 for line in lines)
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["answers"] == 2 and summary["answers_stopped"] == stopped_share(sampled.samples)
    assert "of 2 answers stopped by themselves within 5 tokens" in said.getvalue()
    card = (tmp_path / "a" / "run_card.md").read_text()
    assert "## Answers at the end" in card and "| sample_every | 2 |" in card
    assert (
        not (tmp_path / "b" / "samples.jsonl").exists()
        and "Answers" not in (tmp_path / "b" / "run_card.md").read_text()
    )


def test_p12_a_resumed_run_drops_answers_of_steps_it_repeats(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text('{"step": 2}\n{"step": 4}\n{"step": 6, "pro')
    rows = [{"input_ids": [1, 2], "labels": [-100, 2]}]
    config = SimpleNamespace(num_samples=1)
    data = SimpleNamespace(train=rows, held_out=None)
    sampler = Sampler(config, None, data, None, tmp_path, QUIET)  # type: ignore[arg-type]
    sampler.on_train_begin(None, SimpleNamespace(global_step=3), None)
    assert file.read_text() == '{"step": 2}\n'
    sampler.on_train_begin(None, SimpleNamespace(global_step=0), None)
    assert file.read_text() == ""


def test_the_share_that_stopped() -> None:
    made = [Sample(1, "p", "a", "r", 3, stopped) for stopped in (True, False, False, True)]
    assert stopped_share(made) == 0.5 and stopped_share([]) is None


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"sample_every": 5}, "num_samples is 0, so nothing is sampled"),
        ({"num_samples": -1}, "at least 0"),
        ({"num_samples": 2, "sample_every": 0}, "sample_every is 0"),
        ({"num_samples": 2, "sample_tokens": 0}, "sample_tokens is 0"),
    ],
)
def test_p11_settings_of_samples_that_cannot_work(tmp_path: Path, more: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_config("m", "d.jsonl", tmp_path, **more)
