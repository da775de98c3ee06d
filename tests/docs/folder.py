"""A folder as a reader of the pages would have it: a model, data, configs, runs."""

import csv
import json
import shutil
from pathlib import Path

from examples.public_models import CONFIGS, write_config

ROOT = Path(__file__).resolve().parents[2]


def reader_folder(folder: Path, model: str) -> Path:
    """``folder`` with ./model (a copy of the tiny one), the data the pages name, config.yaml and examples/ beside the
    shapes of the public models that those name."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(model, folder / "model")
    rows = [{"question": f"What comes after {n}?", "answer": f"{n + 1}"} for n in range(48)]
    for name in ("rows", "general", "held_out"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("rows", "mine"):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["question", "answer"])
            writer.writeheader()
            writer.writerows(rows)
    questions = [{"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    (folder / "config.yaml").write_text(
        "model_name_or_path: ./model\ndataset: rows.jsonl\noutput_dir: runs/config\nmax_length: 128\neval_split: 0.1\n"
        "learning_rate: 1.0e-3\nper_device_train_batch_size: 4\n"
    )
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name in CONFIGS:
        write_config(name, folder / name)
    return folder
