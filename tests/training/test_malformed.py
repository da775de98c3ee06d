"""Malformed data and configs, each with the exact message that must come, and nothing else."""

import sys
from pathlib import Path

import pytest
import yaml
from training.malformed.case import Case
from training.malformed.config_files import CONFIGS
from training.malformed.json_files import JSON
from training.malformed.rows_of_data import ROWS
from training.malformed.tables_and_folders import TABLES

from leantune import cli
from leantune.errors import ConfigError
from leantune.training.config import build_config, load_config
from leantune.training.data.load import examine, load_data
from leantune.training.pretrained import ModelLimits

LIMITS = ModelLimits(embedding_rows=320, positions=512)


def by_name(case: Case) -> str:
    return case.name.replace(" ", "_")


@pytest.mark.parametrize("case", [*JSON, *ROWS, *TABLES], ids=by_name)
def test_p7_p8_malformed_data_are_named_with_file_line_field_why_and_fix(case: Case, tmp_path: Path, tokenizer) -> None:
    settings = case.write(tmp_path)
    if "bos" in settings:
        tokenizer.bos_token = settings.pop("bos")
    if "extra" in settings:
        tokenizer.add_tokens([settings.pop("extra")])
    config = build_config({"model_name_or_path": "m", **settings})
    with pytest.raises(ConfigError) as caught:
        load_data(config, tokenizer, LIMITS)
    assert str(caught.value) == case.told(tmp_path)
    try:  # the same reading tells validate, which stops at nothing that has rows or a file
        report = examine(config, tokenizer, LIMITS).report
    except ConfigError as error:
        assert str(error) == case.told(tmp_path)
    else:
        assert not report.clean


@pytest.mark.parametrize("case", CONFIGS, ids=by_name)
def test_p11_malformed_configs_are_told_before_anything_is_loaded(case: Case, tmp_path: Path) -> None:
    case.write(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.yaml")
    assert str(caught.value) == case.told(tmp_path)


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["leantune", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", [*JSON, *ROWS, *TABLES], ids=by_name)
def test_p7_p8_the_command_ends_with_2_and_that_message_and_writes_nothing(
    case: Case, tmp_path: Path, tokenizer, tiny_model_path: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    given, model = tmp_path / "given", tmp_path / "model"
    given.mkdir()
    settings = case.write(given)
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).symlink_to(Path(tiny_model_path) / name)
    if "bos" in settings:
        tokenizer.bos_token = settings.pop("bos")
    if "extra" in settings:
        tokenizer.add_tokens([settings.pop("extra")])
    tokenizer.save_pretrained(model)
    run = tmp_path / "run.yaml"
    run.write_text(yaml.safe_dump({"model_name_or_path": str(model), "output_dir": str(tmp_path / "out"), **settings}))
    before = contents(tmp_path)
    assert ended(monkeypatch, "train", str(run)) == 2
    assert capsys.readouterr().err.rstrip("\n") == f"leantune: {case.told(given)}"
    assert contents(tmp_path) == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["train", "validate", "profile", "plan"])
@pytest.mark.parametrize("case", CONFIGS, ids=by_name)
def test_p11_every_command_that_takes_a_config_ends_with_2_and_that_message(
    case: Case, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    if command == "plan" and case.expected == "- dataset is missing":
        pytest.skip("a plan needs no data")
    case.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    assert ended(monkeypatch, command, str(tmp_path / "run.yaml")) == 2
    told = capsys.readouterr()
    assert told.err.rstrip("\n") == f"leantune: {case.told(tmp_path)}" and told.out == ""
    assert contents(tmp_path) == before
