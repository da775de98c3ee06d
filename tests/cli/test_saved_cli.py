"""leantune merge and leantune eval as a user types them."""

import sys
from pathlib import Path

import pytest

from leantune import cli
from leantune.training.saved import evaluation, merge


def leantune(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["leantune", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_flags_in_both_spellings_reach_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[tuple[object, ...], dict[str, object]]] = []
    for module, name in ((merge, "merge"), (evaluation, "evaluate")):
        monkeypatch.setattr(module, name, lambda *positions, **named: called.append((positions, named)))
    assert leantune(monkeypatch, "merge", "runs/a", "--output-dir", "m", "--model_name_or_path", "b") == 0
    assert called[0] == (("runs/a", "m"), {"model_name_or_path": "b", "dtype": None, "base": None})
    assert leantune(monkeypatch, "eval", "runs/a", "--tasks", "q.jsonl, arc_easy", "--batch-size=2") == 0
    (positions, named) = called[1]
    assert positions == ("runs/a", None) and named["tasks"] == ("q.jsonl", "arc_easy") and named["batch_size"] == 2


@pytest.mark.parametrize("command", ["merge", "eval"])
def test_p11_mistakes_are_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    assert leantune(monkeypatch, command, str(tmp_path)) == 2
    told = capsys.readouterr().err
    assert "holds neither a model" in told and "Traceback" not in told
