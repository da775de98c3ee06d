"""Benchmark rows: written with their provenance, found again, never mixed up."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def rows_module():
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "rows.py"
    spec = importlib.util.spec_from_file_location("benchmark_rows", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_are_found_again_by_their_key(rows_module, tmp_path):
    path = tmp_path / "speed.csv"
    rows = rows_module.ResultRows("speed", ["size", "seconds"], path)
    assert not rows.has(size=4)
    rows.append(seed=0, size=4, seconds=1 / 3)
    again = rows_module.ResultRows("speed", ["size", "seconds"], path)
    assert again.has(size=4, seed=0)
    assert not again.has(size=4, seed=1)
    (row,) = again.read()
    assert row["seconds"] == "0.333333"
    assert row["torch"].startswith("2.")
    assert float(row["ram_gib"]) > 0
    assert all(row[column] for column in rows_module.PROVENANCE)


def test_a_line_cut_short_does_not_swallow_the_next(rows_module, tmp_path):
    path = tmp_path / "speed.csv"
    rows = rows_module.ResultRows("speed", ["size", "seconds"], path)
    rows.append(seed=0, size=1, seconds=1)
    with path.open("a") as file:
        file.write("abc,2.13")
    rows.append(seed=0, size=2, seconds=2)
    assert [row["size"] for row in rows.read()] == ["1", "2"]


def test_other_columns_are_refused(rows_module, tmp_path):
    path = tmp_path / "speed.csv"
    rows = rows_module.ResultRows("speed", ["size"], path)
    with pytest.raises(ValueError, match="no column colour"):
        rows.append(seed=0, colour="red")
    with pytest.raises(ValueError, match="no column colour"):
        rows.has(colour="red")
    rows.append(seed=0, size=1)
    with pytest.raises(ValueError, match="rename the file"):
        rows_module.ResultRows("speed", ["size", "seconds"], path)
    with pytest.raises(ValueError, match="twice: seed"):
        rows_module.ResultRows("speed", ["seed"], path)
