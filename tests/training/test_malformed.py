"""Malformed data and configs, each with the exact message that must come, and nothing else."""

from pathlib import Path

import pytest
from training.malformed.case import Case
from training.malformed.config_files import CONFIGS
from training.malformed.json_files import JSON
from training.malformed.rows_of_data import ROWS
from training.malformed.tables_and_folders import TABLES

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
