"""The benchmark of the plan's accuracy covers what it says, and a case of it is within its bounds."""

import importlib
import sys
from pathlib import Path

import pytest


@pytest.fixture
def plan_accuracy(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    yield importlib.import_module("plan_accuracy")
    sys.modules.pop("plan_accuracy", None)


def test_the_cases_cover_every_way_of_training(plan_accuracy):
    cases = plan_accuracy.cases()
    assert len(set(cases)) == len(cases) >= 24
    for name in ("fused", "velora", "checkpointing"):
        assert {getattr(case, name) for case in cases} == {True, False}
    assert {case.optim for case in cases} == {*plan_accuracy.OURS, "torch_adamw"}
    assert {case.method for case in cases} == {"full", "lora"}


@pytest.mark.slow
def test_p1_a_tiny_plan_is_within_three_percent_of_its_step(plan_accuracy):
    for case in plan_accuracy.cases()[:12]:
        assert case.model == "tiny"
        assert abs(plan_accuracy.measure(case)["error"]) <= 0.03, case
