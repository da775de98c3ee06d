"""run_card.md, the curves, and the trackers that a run reports to."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console
from tiny_runs import tiny_config, without_pictures, write_rows

from leantune.errors import ConfigError
from leantune.training.curves import plot_curves
from leantune.training.run import train

QUIET = Console(quiet=True)


def test_the_card_holds_data_settings_methods_memory_results_and_versions(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pictures(monkeypatch)
    rows = write_rows(tmp_path, 8)
    config = tiny_config(tiny_model_path, rows, tmp_path / "out", max_length=32, max_steps=2, eval_split=0.25)
    result = train(config, console=QUIET)
    card = (tmp_path / "out" / "run_card.md").read_text()
    assert card.startswith("# out\n") and "\n\n\n" not in card
    for title in ("Results", "Data", "Methods", "Memory of tensors at 4 x ", "Settings", "Versions"):
        assert f"\n## {title}" in card
    assert f"{result.held_out_before:.4f}, {result.held_out_after:.4f}" in card
    assert "6 rows an epoch, 2 held out." in card and f"| {rows} | dataset | text | 8 |" in card
    assert "| eval_split | 0.25 |" in card and "| seed |" not in card
    assert "| weights | bfloat16" in card and "| torch |" in card
    assert "![" not in card  # no pictures were drawn
    for table in card.split("\n\n"):
        lines = [line for line in table.splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in lines}) <= 1


def test_curves_have_a_panel_for_what_was_logged(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 2.0 / step, "grad_norm": 1.0, "learning_rate": 1e-4} for step in (1, 2, 3)]
    assert plot_curves([*rows, {"step": 3, "eval_loss": 1.0}], tmp_path / "c.png") == tmp_path / "c.png"
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert plot_curves([{"step": 1, "train_runtime": 3.0}], tmp_path / "none.png") is None
    assert not (tmp_path / "none.png").exists()


def test_p11_a_tracker_that_is_not_installed_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.integrations.get_available_reporting_integrations", lambda: ["tensorboard"])
    config = tiny_config("no_model", "no_rows.jsonl", tmp_path / "out", report_to=["tensorboard", "trackio"])
    with pytest.raises(ConfigError, match=r"no tracker wandbb; did you mean 'wandb'\?"):
        train(tiny_config("no_model", "no_rows.jsonl", tmp_path / "out", report_to="wandbb"))
    with pytest.raises(ConfigError, match="report_to: trackio is not installed here"):
        train(config, console=QUIET)


@pytest.mark.slow
def test_what_is_logged_reaches_tensorboard(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    without_pictures(monkeypatch)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    more = {"max_length": 32, "max_steps": 3, "eval_split": 0.25, "report_to": "tensorboard", "eval_strategy": "epoch"}
    result = train(tiny_config(tiny_model_path, write_rows(tmp_path, 16), tmp_path / "out", **more), console=QUIET)
    (folder,) = {path.parent for path in (tmp_path / "board").rglob("events.*")}
    board = events.EventAccumulator(str(folder)).Reload()
    logged = {row["step"]: row for row in result.log if "loss" in row}
    for name in ("loss", "grad_norm", "learning_rate"):
        shown = {event.step: event.value for event in board.Scalars(f"train/{name}")}
        assert shown == pytest.approx({step: row[name] for step, row in logged.items()})
    assert board.Scalars("eval/loss")


@pytest.mark.slow
def test_what_is_logged_reaches_wandb_offline(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    without_pictures(monkeypatch)
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    more = {"max_length": 32, "max_steps": 3, "report_to": "wandb", "run_name": "tiny"}
    train(tiny_config(tiny_model_path, write_rows(tmp_path, 16), tmp_path / "out", **more), console=QUIET)
    import wandb

    wandb.finish()
    (kept,) = tmp_path.rglob("offline-run-*/*.wandb")
    content = kept.read_bytes()
    assert all(name in content for name in (b"train/loss", b"train/grad_norm", b"train/learning_rate"))


@pytest.mark.slow
def test_what_is_logged_reaches_trackio(tiny_model_path: str, tmp_path: Path) -> None:
    """In a process of its own: trackio reads its folder when it is imported, and serves it from a thread."""
    pytest.importorskip("trackio")
    config = tiny_config(
        tiny_model_path, write_rows(tmp_path, 16), tmp_path / "out", max_length=32, max_steps=3, report_to="trackio"
    )
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "leantune", "train", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    (kept,) = (tmp_path / "trackio").glob("*.db")
    with closing(sqlite3.connect(kept)) as database:
        rows = [json.loads(row) for (row,) in database.execute("SELECT metrics FROM metrics ORDER BY step")]
    logged = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [row["train/loss"] for row in rows if "train/loss" in row] == [
        row["loss"] for row in logged if "loss" in row
    ]
