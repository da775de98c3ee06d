"""leantune train as a user types it: arguments in any order, mistakes told plainly."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from leantune import cli
from leantune.training import run as run_module


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list:
    """The configs that would have been trained."""
    configs: list = []
    monkeypatch.setattr(run_module, "train", configs.append)
    return configs


def leantune(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["leantune", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["FILE", "--max-steps", "-1", "--packing", "--learning_rate=1e-4"],
        ["--model_name_or_path", "m", "--dataset=d.jsonl", "--packing", "--max_steps", "-1", "--lr", "1e-4"],
    ],
)
def test_a_file_and_flags_or_flags_alone(monkeypatch, tmp_path: Path, started: list, arguments: list[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\ndataset: d.jsonl\nmax_steps: 3\n")
    assert leantune(monkeypatch, "train", *[str(file) if word == "FILE" else word for word in arguments]) == 0
    (config,) = started
    assert (config.model_name_or_path, config.dataset) == ("m", "d.jsonl")
    assert (config.max_steps, config.packing, config.learning_rate) == (-1, True, 1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], ["model_name_or_path is missing", "dataset is missing"]),
        (["train", "none.yaml"], ["no config file none.yaml"]),
        (["train", "--optimm", "lomo", "--warmup_ratio", "0.1"], ["did you mean 'optim'", "warmup_steps"]),
        (["train", "--model", "m", "--dataset", "d.jsonl", "stray.yaml"], ["'stray.yaml' is no flag"]),
    ],
)
def test_p11_mistakes_are_told_without_a_traceback(monkeypatch, capsys, started, arguments, words) -> None:
    assert leantune(monkeypatch, *arguments) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in words) and "Traceback" not in told
    assert not started


def test_the_help_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom leantune.cli import main\nsys.argv = ['leantune', 'train', '--help']\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'trl') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.rstrip().endswith("[]")
    assert "--learning_rate 1e-4" in shown and "--resume" in shown


def test_a_command_trains_a_tiny_model(monkeypatch, tiny_model_path: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) + "\n" for n in range(8)))
    flags = ["--dataset", str(rows), "--output-dir", str(tmp_path / "out"), "--max-steps=2", "--max_length", "32"]
    assert leantune(monkeypatch, "train", "--model-name-or-path", tiny_model_path, *flags) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert "max_length: 32" in (tmp_path / "out" / "leantune_config.yaml").read_text()
