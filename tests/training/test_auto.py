"""Three facts and no method: leantune train chooses, says why, refuses what does not fit, and finds out before step 1
what would end the run hours in."""

import io
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from rich.console import Console
from training.tiny_runs import tiny_config, without_pictures, write_rows
from typer.testing import CliRunner

from leantune.cli import command_line, main
from leantune.errors import ConfigError, NotEnoughRoomError
from leantune.memory.budget.model_files import read_sizes
from leantune.training.config import build_config
from leantune.training.data.batch_order import LongestFirst
from leantune.training.planning.auto import ADAPTER_RATES, FULL_RATES, before_the_data
from leantune.training.planning.need import closed_form
from leantune.training.planning.settings import batch_shape, settings_of
from leantune.training.run import build_trainer, load_model, load_rows, plan_of_run, train

QUIET = Console(file=io.StringIO())


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)


def facts(model: str, rows: str, out: Path, budget: str, **more: object) -> dict[str, object]:
    return {"model_name_or_path": model, "dataset": rows, "output_dir": str(out), "memory_budget": budget, **more}


def test_three_facts_are_enough_and_the_choice_is_told_in_five_lines(tiny_model_path: str, tmp_path: Path) -> None:
    rows, said = write_rows(tmp_path, 24), io.StringIO()
    config = build_config(facts(tiny_model_path, rows, tmp_path / "out", "1GiB", max_steps=2))
    result = train(config, console=Console(file=said, width=200))
    lines = said.getvalue().splitlines()
    start = lines.index("method: auto")
    heads = ("chosen: full, AdamW, fp32 weights", "because: it needs", "costs:", "next best: full, ternary", "you set:")
    assert all(line.startswith(head) for line, head in zip(lines[start + 1 : start + 6], heads, strict=True))
    assert next(result.model.parameters()).dtype == torch.float32
    resolved = (tmp_path / "out" / "leantune_config.yaml").read_text()
    assert "method: full\n" in resolved and "optim: adamw\n" in resolved and "learning_rate: 5.0e-05\n" in resolved
    assert "max_length: 64\n" in resolved, "from the rows"
    again = build_config(facts(tiny_model_path, rows, tmp_path / "out", "1GiB", max_steps=3, resume=True))
    assert train(again, console=QUIET).log[-1]["step"] == 3, "the same is chosen again"


def test_exit_code_3_before_anything_is_loaded_and_force(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, out = write_rows(tmp_path, 24), tmp_path / "out"
    given = facts(tiny_model_path, rows, out, "100KiB", max_steps=1, method="full")
    flags = [f"--{key}={value}" for key, value in given.items()]

    def load(*arguments: object) -> None:
        raise AssertionError("loaded")

    with monkeypatch.context() as patched:
        patched.setattr("leantune.training.run.load_model", load)
        patched.setattr("sys.argv", ["leantune", "train", *flags])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 3 and not out.exists()
    told = capsys.readouterr()
    assert "memory_budget is 100KiB, and the plan needs" in told.err and "What would make room" in told.err
    done = CliRunner().invoke(command_line(), ["train", *flags, "--force"])
    assert done.exit_code == 0, done.output
    assert (out / "summary.json").is_file() and "force" not in (out / "leantune_config.yaml").read_text()


def test_keys_that_were_set_stay(tiny_model_path: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path, 24)
    given = {"optim": "adalomo", "max_length": 40, "learning_rate": 7e-4, "per_device_train_batch_size": 2}
    config, _, data = load_rows(build_config(facts(tiny_model_path, rows, tmp_path / "out", "1GiB", **given)))
    assert data.recipe is not None and config.method == "full"
    assert {key: getattr(config, key) for key in given} == given
    assert data.recipe.lines[-1].startswith("you set: dataset, learning_rate, max_length, model_name_or_path, optim")


def test_a7_auto_takes_the_longest_rows_first_and_other_runs_keep_the_trainers_order(
    tiny_model_path: str, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path, 24)
    for more, ordered in (({}, True), ({"longest_first": False}, False), ({"method": "full"}, False)):
        made = build_config(facts(tiny_model_path, rows, tmp_path / "out", "1GiB", **more))
        config, tokenizer, data = load_rows(made)
        trainer = build_trainer(config, load_model(config), tokenizer, data)
        assert config.longest_first == isinstance(trainer._get_train_sampler(), LongestFirst) == ordered
    with pytest.raises(ConfigError, match="longest_first orders whole rows"):
        build_config(facts(tiny_model_path, rows, tmp_path / "out", "1GiB", longest_first=True, packing=True))


def test_without_a_budget_on_a_cpu_auto_is_full(tiny_model_path: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path, 24)
    config, _, data = load_rows(tiny_config(tiny_model_path, rows, tmp_path / "out", method="auto"))
    assert config.method == "full" and data.recipe is None
    assert any("without one this is method: full" in note for note in config.notes)


def test_on_a_gpu_a_method_that_was_not_set_is_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"model_name_or_path": "m", "dataset": "d"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert before_the_data(build_config(values)).method == "auto"
    assert before_the_data(build_config(values)).max_length == 0
    assert before_the_data(build_config({**values, "method": "lora"})).method == "lora"


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_p1_the_runs_own_plan_knows_what_is_recomputed(
    tiny_model_path: str, tmp_path: Path, every: int, method: str
) -> None:
    """The plan of the loaded model, made before transformers turns checkpointing on, is that in closed form."""
    more = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": every}}
    more |= {"method": method, "optim": "adamw", "fused_backward": False, "max_length": 64}
    config, tokenizer, data = load_rows(tiny_config(tiny_model_path, write_rows(tmp_path, 24), tmp_path / "o", **more))
    plan = plan_of_run(config, build_trainer(config, load_model(config), tokenizer, data), data)
    settings = settings_of(config, batch_shape(config, data.longest, data.padded), cuda=False)
    closed = closed_form(config, read_sizes(tiny_model_path), settings).saved
    assert plan is not None and settings.padded
    kept, planned = (saved["activations"] + saved["loss"] for saved in (plan.saved, closed))
    assert kept == pytest.approx(planned, rel=0.001)


def test_rates_fall_with_size() -> None:
    for rates in (FULL_RATES, ADAPTER_RATES):
        assert [rate for _, rate in rates] == sorted((rate for _, rate in rates), reverse=True)
        assert [size for size, _ in rates] == sorted(size for size, _ in rates)


def test_a7_p4_a_checkpoint_is_written_and_removed_before_the_first_step(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, out = write_rows(tmp_path, 24), tmp_path / "out"
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patched:
        patched.setattr("leantune.training.save_probe.shutil.disk_usage", lambda folder: usage(10**9, 10**9, 1000))
        with pytest.raises(NotEnoughRoomError, match=r"1000 B free.*Nothing was trained"):
            train(tiny_config(tiny_model_path, rows, out, max_steps=2), console=QUIET)

    def full(*arguments: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("leantune.training.trainer.LeanTrainer.save_model", full)
        with pytest.raises(NotEnoughRoomError, match=r"no checkpoint can be written.*No space left"):
            train(tiny_config(tiny_model_path, rows, out, max_steps=2), console=QUIET)
    assert not (out / ".saving").exists() and not list(out.glob("checkpoint-*"))
    train(tiny_config(tiny_model_path, rows, out, max_steps=2), console=QUIET)
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-2"]
