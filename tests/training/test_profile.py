"""Profiles of tiny runs: every stage measured, plan beside it, a full budget stopped and explained."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from datasets import Dataset
from rich.console import Console
from tiny_runs import tiny_config, write_rows
from typer.testing import CliRunner

from leantune.cli import command_line
from leantune.errors import ConfigError, MemoryBudgetError
from leantune.memory.closed_form.settings import RunSettings
from leantune.memory.reports.calibration import read_calibration
from leantune.memory.reports.stages import FIRST_STEP, RESUME, STAGES, STEP, TOTAL
from leantune.training.config.run_config import OUR_OPTIMIZERS
from leantune.training.data.load import PreparedData
from leantune.training.data.report import DataReport
from leantune.training.profiling import profile as profiling
from leantune.training.profiling import resumed_step
from leantune.training.profiling.longest import longest_first
from leantune.training.profiling.planned import PlannedRun

QUIET = Console(quiet=True)


def config(model: str, folder: Path, **more: object):
    return tiny_config(model, write_rows(folder, 20), folder / "out", max_length=64, **more)


def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own takes longer than everything else here; the slow test below starts one."""

    def run(command, **_):
        monkeypatch.setattr("sys.argv", command[2:])
        resumed_step.main()
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(profiling.subprocess, "run", run)


def check_whole(found, folder: Path, packed: bool = False) -> None:
    assert [stage.stage for stage in sorted(found.stages, key=lambda s: STAGES.index(s.stage))] == list(STAGES)
    assert all(stage.peak_bytes > 0 for stage in found.stages)
    step = next(row for row in found.rows if (row.stage, row.part) == (STEP, TOTAL))
    assert abs(step.error) < 0.05
    # Packed steps differ a little, by how rows fall into them; all others are alike.
    room = 1.01 if packed else 1.0
    assert found.stage(RESUME).peak_bytes <= room * max(s.peak_bytes for s in found.stages if s.stage != RESUME)
    again = read_calibration(folder)
    assert again.ratio(STEP) == step.measured / step.planned
    saved = json.loads((folder / "memory_profile.json").read_text())
    assert saved["outcome"] == "fits" and saved["shortage"] is None
    assert "steady step" in (folder / "memory_report.html").read_text()
    assert sorted(path.name for path in folder.iterdir()) == [
        "memory_calibration.json",
        "memory_profile.json",
        "memory_report.html",
    ]


def test_p1_p3_p4_every_stage_is_measured(tiny_model_path: str, tmp_path: Path, monkeypatch) -> None:
    in_this_process(monkeypatch)
    run = config(tiny_model_path, tmp_path, eval_split=0.2)
    found = profiling.profile(run, console=QUIET)
    check_whole(found, tmp_path / "out" / "profile")
    assert found.stage(FIRST_STEP).parts["optimizer_states"] <= found.stage(STEP).parts["optimizer_states"]
    assert found.tokens_per_second > 0 and found.modules


def test_p10_a_full_budget_ends_with_a_report_and_exit_code_3(tiny_model_path: str, tmp_path: Path) -> None:
    given = ["--model_name_or_path", tiny_model_path, "--dataset", write_rows(tmp_path, 20), "--max_length", "64"]
    given += ["--output_dir", str(tmp_path / "out"), "--memory_budget", "600KiB", "--method", "full"]
    ended = CliRunner().invoke(command_line(), ["profile", *given])
    assert ended.exit_code == 3, ended.output
    folder = tmp_path / "out" / "profile"
    shortage = json.loads((folder / "memory_profile.json").read_text())["shortage"]
    assert shortage["stage"] == FIRST_STEP and shortage["module"] and shortage["operator"].startswith("aten")
    assert sum(shortage["live"].values()) > 600 * 1024
    assert shortage["others"]
    assert "What would make room" in (folder / "memory_report.html").read_text()
    assert not (folder / "memory_calibration.json").exists()
    assert "fix: " in ended.output


def test_a7_the_longest_rows_fill_every_step(tiny_model_path: str, tmp_path: Path) -> None:
    lengths = [3, 9, 5, 7, 2]
    rows = Dataset.from_list([{"input_ids": list(range(n)), "labels": list(range(n))} for n in lengths])
    run = dataclasses.replace(config(tiny_model_path, tmp_path), per_device_train_batch_size=2)
    chosen = longest_first(run, PreparedData(rows, rows, DataReport(False), 9), steps=3)
    assert [len(ids) for ids in chosen.train["input_ids"]] == [9, 7] * 3
    assert [len(ids) for ids in chosen.held_out["input_ids"]] == [9, 7, 5, 3]
    few = longest_first(
        dataclasses.replace(run, per_device_train_batch_size=8), PreparedData(rows, None, DataReport(False), 9), 1
    )
    assert len(few.train) == 8  # fewer rows than a batch: they come again


def test_every_stage_is_planned_and_its_advice_is_the_plans(tiny_model_path: str, tmp_path: Path, monkeypatch) -> None:
    in_this_process(monkeypatch)
    run = config(tiny_model_path, tmp_path, eval_split=0.2, optim="adamw", fused_backward=False)
    found = profiling.profile(run, console=QUIET)
    totals = {row.stage: row for row in found.rows if row.part == TOTAL}
    assert list(totals) == list(STAGES) and all(row.planned for row in totals.values())
    # Of so small a model an update's temporaries, which are planned roughly, are a tenth of the first step.
    assert all(abs(row.error) < (0.15 if name == "first step" else 0.02) for name, row in totals.items()), totals
    assert found.advice[0].startswith("per_device_train_batch_size: 2: saves ")


def test_a_model_outside_the_closed_form_is_advised_by_its_parts() -> None:
    settings = RunSettings(4, 64, optim="adamw_torch", fused=False, exact_loss=False)
    parts = {"weights": 100, "optimizer_states": 800, "gradients": 200, "activations": 400, "loss": 50}
    advice = PlannedRun(settings, None, None, None, None).advice(parts, None)
    assert advice[0].startswith("exact_savings: true: works on 450 B (logits and loss, saved activations)")
    assert any(one.startswith("optim: ternary_adamw: works on 1000 B") for one in advice)
    lean = RunSettings(1, 64, optim="ternary_adamw", checkpoint_every=1)
    done = ("exact", "optim: ternary", "fused", "gradient", "per_device")
    assert not [one for one in PlannedRun(lean, None, None, None, None).advice(parts, None) if one.startswith(done)]


def test_what_exceeds_a_budget_is_exit_code_3_in_every_command(monkeypatch) -> None:
    from leantune import cli

    details = {"live": 2, "budget": 1, "size": 1, "part": "loss", "phase": "forward", "module": "", "operator": ""}

    def fail():
        raise MemoryBudgetError("too much", **details)

    monkeypatch.setattr(cli, "command_line", lambda: fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 3


@pytest.mark.parametrize(
    ("optim", "fused"),
    [
        pytest.param(optim, fused, marks=[] if (optim, fused) == ("adamw", True) else pytest.mark.slow)
        for optim in (*OUR_OPTIMIZERS, "adamw_torch", "adafactor", "sgd")
        for fused in ((True, False) if optim in OUR_OPTIMIZERS else (False,))
    ],
)
def test_p3_resuming_needs_no_more_than_training_whatever_the_optimizer(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optim: str, fused: bool
) -> None:
    in_this_process(monkeypatch)
    run = config(tiny_model_path, tmp_path, optim=optim, fused_backward=fused)
    found = profiling.profile(run, console=QUIET)
    trained = max(stage.peak_bytes for stage in found.stages if stage.stage in (FIRST_STEP, STEP))
    assert 0 < found.stage(RESUME).peak_bytes <= trained


@pytest.mark.parametrize("command", ["profile", "merge", "eval"])
def test_what_runs_in_one_process_is_refused_to_a_launcher(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Before anything is read: none of what is named here exists."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = ["--model_name_or_path", "m", "--dataset", "d", "--output_dir", "o"] if command == "profile" else ["run"]
    ended = CliRunner().invoke(command_line(), [command, *given])
    said = f"- leantune {command} runs in one process, and a launcher (torchrun, accelerate launch) started 2"
    assert isinstance(ended.exception, ConfigError) and str(ended.exception).startswith(said)
    assert f"Write leantune {command}" in str(ended.exception)


def test_a_profile_starts_no_processes() -> None:
    given = ["--model_name_or_path", "m", "--dataset", "d", "--nproc_per_node", "2"]
    ended = CliRunner().invoke(command_line(), ["profile", *given])
    assert isinstance(ended.exception, ConfigError)
    assert "--nproc_per_node is 2, and leantune profile runs in one process" in str(ended.exception)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{}, {"method": "lora", "fused_backward": False}, {"velora_target_modules": ["down_proj"]}, {"packing": True}],
)
def test_p3_resuming_in_a_process_of_its_own_needs_no_more_than_training(tiny_model_path, tmp_path, more) -> None:
    found = profiling.profile(config(tiny_model_path, tmp_path, eval_split=0.2, **more), console=QUIET)
    check_whole(found, tmp_path / "out" / "profile", packed="packing" in more)


@pytest.mark.slow
def test_the_command_profiles_a_config(tiny_model_path: str, tmp_path: Path) -> None:
    run = config(tiny_model_path, tmp_path)
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    leantune = Path(sys.executable).with_name("leantune")
    ended = subprocess.run([leantune, "profile", str(tmp_path / "run.yaml")], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "steady step" in ended.stdout
    wrong = subprocess.run([leantune, "profile", "--modle", "x"], capture_output=True, text=True)
    assert wrong.returncode == 2
