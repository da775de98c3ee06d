"""eval: the held-out loss is the one that training logged, on the rows that training held out."""

import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from saved_adapters import saved_adapter
from tiny_runs import tiny_config, without_pictures, write_rows

from leantune.errors import ConfigError
from leantune.training.run import train
from leantune.training.saved import evaluation as evaluation_module
from leantune.training.saved.evaluation import evaluate
from leantune.training.saved.task_evaluation import check_tasks

QUIET = Console(quiet=True)


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    without_pictures(monkeypatch)
    return write_rows(tmp_path, 20)


def trained(model: str, rows: str, output: Path, **more: object) -> float:
    """The held-out loss at the end of a run of two steps."""
    settings = {"max_length": "auto", "max_steps": 2, "eval_split": 0.25, **more}
    loss = train(tiny_config(model, rows, output, **settings), console=QUIET).held_out_after
    assert loss is not None
    return loss


@pytest.mark.parametrize(
    "more",
    [
        {"method": "lora"},
        {"dtype": "float32", "bf16": True, "max_length": 24},
        pytest.param({"method": "qlora", "packing": True}, marks=pytest.mark.slow),
        pytest.param({"exact_savings": False}, marks=pytest.mark.slow),
    ],
    ids=["adapter", "autocast", "four bits, packed", "full logits"],
)
def test_a6_the_loss_is_the_one_that_training_logged(
    tiny_model_path: str, rows: str, tmp_path: Path, more: dict[str, object]
) -> None:
    if more.get("method") == "qlora":
        pytest.importorskip("bitsandbytes")
    out = tmp_path / "out"
    logged = trained(tiny_model_path, rows, out, **more)
    result = evaluate(str(out), batch_size=4, console=QUIET)
    assert result.loss == pytest.approx(logged, rel=2e-3 if more.get("bf16") else 1e-5)
    assert result.rows == 5 and result.perplexity == pytest.approx(math.exp(result.loss or 0.0))
    assert json.loads((out / "eval.json").read_text())["loss"] == result.loss


def test_a_streamed_run_is_evaluated_on_its_eval_dataset(tiny_model_path: str, rows: str, tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps({"text": f"Held out, row {number}."}) + "\n" for number in range(4)))
    more = {"streaming": True, "eval_split": None, "eval_dataset": str(held), "max_length": 32}
    logged = trained(tiny_model_path, rows, tmp_path / "out", **more)
    Path(rows).unlink()  # the training rows are not needed
    result = evaluate(str(tmp_path / "out"), batch_size=4, console=QUIET)
    assert (result.rows, result.loss) == (4, pytest.approx(logged, rel=1e-5))


def test_rows_that_were_trained_on_are_never_taken_for_held_out_ones(
    tiny_model_path: str, rows: str, tmp_path: Path
) -> None:
    trained(tiny_model_path, rows, tmp_path / "out")
    with pytest.raises(ConfigError, match="decided which rows were held"):
        evaluate(str(tmp_path / "out"), max_length=8, console=QUIET)
    lines = Path(rows).read_text().splitlines(keepends=True)
    Path(rows).write_text("".join(lines[::-1]))
    with pytest.raises(ConfigError, match="are others than those that"):
        evaluate(str(tmp_path / "out"), console=QUIET)
    assert evaluate(str(tmp_path / "out"), rows, max_length=8, console=QUIET).rows == 20


def test_an_adapter_and_a_plain_model_are_evaluated_on_given_rows(
    tiny_model_path: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    adapter = saved_adapter(tiny_model_path, tmp_path / "adapter", added_tokens=2)
    moved, plain = (evaluate(model, rows, console=QUIET) for model in (adapter, tiny_model_path))
    assert moved.tokens == plain.tokens and moved.loss != plain.loss
    assert plain.loss == pytest.approx(math.log(320), rel=0.05)  # a random model
    assert (tmp_path / "eval.json").is_file()


def test_p11_what_cannot_be_evaluated_is_said_before_anything_is_loaded(
    tiny_model_path: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation_module, "load_saved", lambda *rest: pytest.fail("loaded"))
    cases = [
        ((tiny_model_path,), {}, "dataset is missing"),
        ((str(tmp_path / "none"), rows), {}, "cannot be found"),
        ((tiny_model_path, rows), {"dtype": "half"}, "write float32"),
        ((tiny_model_path, rows), {"batch_size": 0}, "write 1 or more"),
        ((tiny_model_path, rows), {"model_name_or_path": tiny_model_path}, "is a whole model; leave it out"),
        ((tiny_model_path, str(tmp_path / "none.jsonl")), {}, "none.jsonl"),
    ]
    for arguments, more, words in cases:
        with pytest.raises(ConfigError, match=words):
            evaluate(*arguments, console=QUIET, **more)


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_missing_lm_eval_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leantune.training.saved.task_evaluation.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'leantune\[eval\]'"):
        check_tasks(("questions.jsonl",))


def test_lines_that_are_no_questions_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leantune.training.saved.task_evaluation.find_spec", lambda name: True)
    file = tmp_path / "questions.jsonl"
    wrong = ["[]", '{"q": 1}', '{"question": "?", "choices": ["a", "b"], "answer": 2}', "{half"]
    file.write_text("\n".join(wrong))
    with pytest.raises(ConfigError) as told:
        check_tasks((str(file),))
    assert "4 lines are no questions" in str(told.value) and "answer 2 is beyond the 2 choices" in str(told.value)
    file.write_text('{"prompt": "a", "completion": "b"}\n{"question": "?", "choices": ["a", "b"], "answer": 1}')
    with pytest.raises(ConfigError, match="mixes"):
        check_tasks((str(file),))
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no questions"):
        check_tasks((str(file),))
    with pytest.raises(ConfigError, match="there is no file"):
        check_tasks(("none.jsonl",))


@pytest.mark.slow
def test_files_of_questions_are_run_by_lm_eval_without_a_network(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against log-likelihoods worked out here; the tiny model was given a bias towards one answer."""
    pytest.importorskip("lm_eval")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    questions = [("Two and two is", ["three", "four"], "B"), ("The sky is", ["blue", "a lemon"], 0)] * 2
    completions = [("Count: one, two,", " three"), ("Paris is", " the capital")]
    first, second = tmp_path / "questions.jsonl", tmp_path / "completions.jsonl"
    first.write_text("".join(json.dumps(dict(zip(("question", "choices", "answer"), row))) + "\n" for row in questions))
    second.write_text("".join(json.dumps(dict(zip(("prompt", "completion"), row))) + "\n" for row in completions))
    result = evaluate(
        tiny_model_path, tasks=(str(first), str(second)), batch_size=2, dtype="float32", limit=3, console=QUIET
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)

    @torch.no_grad()
    def likelihood(prompt: str, rest: str) -> float:
        start = len(tokenizer(prompt).input_ids)
        ids = torch.tensor(tokenizer(prompt + rest).input_ids)
        scores = model(ids[None]).logits[0].log_softmax(-1)
        return float(sum(scores[at - 1, ids[at]] for at in range(start, len(ids))))

    right = [
        max(range(2), key=lambda n: likelihood(asked, f" {choices[n]}")) == (1 if answer == "B" else answer)
        for asked, choices, answer in questions[:3]
    ]
    assert result.tasks["questions"]["questions"] == 3
    assert result.tasks["questions"]["figures"]["acc"][0] == pytest.approx(sum(right) / 3)
    mean = sum(likelihood(*row) for row in completions) / 2
    assert result.tasks["completions"]["figures"]["perplexity"][0] == pytest.approx(math.exp(-mean), rel=1e-3)
    assert result.loss is None
    with pytest.raises(ConfigError, match="has no task no_such_task"):
        evaluate(tiny_model_path, tasks=("no_such_task",), console=QUIET)
