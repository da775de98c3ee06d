"""Every benchmark script can be imported: none has been left behind by the code it measures."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
NOT_HERE = {"torchao", "sklearn", "scipy", "galore_torch"}
"""Packages of the extra "bench", which the tests do without."""


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_a_script_is_importable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in NOT_HERE:
            raise
        pytest.skip(f"{error.name} is not installed")
