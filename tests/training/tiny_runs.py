"""What the files about whole training runs share: rows to train on, a config of a tiny run, no pictures."""

import json
from pathlib import Path

import pytest

from leantune.training.config import TrainConfig, build_config
from leantune.training.log import RunLog


def write_rows(folder: Path, count: int) -> str:
    """``count`` rows of text in a jsonl file under ``folder``; returns its path."""
    path = folder / "rows.jsonl"
    lines = [{"text": f"Row {number} says {number * 7 % 11} and {'x' * (number % 5)}."} for number in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def tiny_config(model: str, rows: str, output: Path, **more: object) -> TrainConfig:
    """4 rows a step at a rate that moves the tiny model; the rest by name."""
    common = {"learning_rate": 1e-3, "per_device_train_batch_size": 4}
    return build_config({"model_name_or_path": model, "dataset": rows, "output_dir": str(output), **common, **more})


def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than a tiny run; test_train.py's first test looks at the pictures."""
    monkeypatch.setattr("leantune.training.run.plot_memory", lambda *arguments, **more: None)
    monkeypatch.setattr(RunLog, "plot", lambda *arguments: None)
