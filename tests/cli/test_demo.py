"""The demo end to end on the tiny model, in processes of its own, as a user starts it."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import yaml
from safetensors.torch import load_file

from leantune.errors import ConfigError
from leantune.training.demo_model import demo_model_path

demo = importlib.import_module("leantune.cli.demo")  # the module: the command has the same name


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "140"}
    command = [sys.executable, "-c", "from leantune.cli import main; main()", "demo", "--tiny", "--max_steps", "3"]
    run = subprocess.run(
        [*command, "--output_dir", str(folder / "out")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return folder / "out", run.stdout


def results(folder):
    return json.loads((folder / "demo.json").read_text(encoding="utf-8"))


def test_it_says_what_the_model_is_and_ends_with_a_table_of_both_sides(finished):
    folder, printed = finished
    assert "a random 2-layer Llama" in " ".join(printed.split())
    table = printed[printed.index("held-out loss before") :]
    parts = ("weights", "optimizer states", "gradients", "saved activations", "logits and loss", "temporaries")
    for label in ("exact match before", "exact match after", "VeLoRA's own saving", "tokens/s", "peak of all parts"):
        assert label in table
    for part in parts:
        assert f"peak of {part}" in table
    for shown in results(folder)["leantune"]["answers"][: demo.SHOWN_ROWS]:
        assert shown["sentence"] in " ".join(table.split())


def test_both_sides_start_from_the_same_loss_and_train(finished):
    sides = results(finished[0])
    ours, theirs = sides["leantune"], sides["torch AdamW"]
    # The same weights and rows; bfloat16 arithmetic on one side only.
    assert ours["held_out_before"] == pytest.approx(theirs["held_out_before"], rel=2e-3)
    for side in (ours, theirs):
        assert side["held_out_after"] < side["held_out_before"]
        assert 0 <= side["exact_after"] <= side["answered"] == len(side["answers"])


def test_the_memory_figures_are_those_of_the_methods(finished):
    sides = results(finished[0])
    ours, theirs = sides["leantune"]["part_peaks"], sides["torch AdamW"]["part_peaks"]
    parameters = theirs["weights"] / 4
    assert ours["weights"] / 2 == pytest.approx(parameters, rel=0.01)
    assert theirs["optimizer_states"] == pytest.approx(8 * parameters, rel=0.01)
    assert ours["optimizer_states"] < 2 * parameters  # narrow matrices; 0.46 bytes at real widths
    # The tied embedding's gradient exists up to three times while its two uses are added up.
    tied = 512 * 64 * 4
    assert 4 * parameters <= theirs["gradients"] <= 1.01 * (4 * parameters + 2 * tied)
    assert ours["gradients"] < theirs["gradients"] / 2  # half of this model is its tied embedding
    for name, side in sides.items():
        assert max(side["part_peaks"].values()) <= side["peak_bytes"] <= sum(side["part_peaks"].values()), name
    saved, exact = (sides["leantune"][f"velora_{kind}_bytes"] for kind in ("saved", "exact"))
    assert saved / exact == pytest.approx(1 - 32 / 192)  # 32 numbers are kept of each token's 192
    assert sides["torch AdamW"]["velora_saved_bytes"] is None


def test_everything_is_written_under_the_output_folder(finished):
    folder, _ = finished
    for name in ("leantune", "torch_adamw"):
        for file in ("log.jsonl", "loss.png", "memory.png", "leantune_config.yaml", "model.safetensors", "config.json"):
            assert (folder / name / file).stat().st_size > 0
    summary = (folder / "demo.md").read_text(encoding="utf-8")
    assert "| exact match after |" in summary and "- torch AdamW: `" in summary
    first, second = (
        yaml.safe_load((folder / name / "leantune_config.yaml").read_text()) for name in ("leantune", "torch_adamw")
    )
    for key in ("dataset", "eval_dataset", "seed", "max_steps", "per_device_train_batch_size", "model_name_or_path"):
        assert first[key] == second[key]
    # What was trained is what was saved: the two models differ from each other.
    ours, theirs = (load_file(folder / name / "model.safetensors") for name in ("leantune", "torch_adamw"))
    assert any((ours[key].float() - theirs[key].float()).abs().max() > 0 for key in ours)


def test_an_earlier_demo_is_replaced_and_nothing_else_is_touched(tmp_path):
    (tmp_path / "leantune").mkdir()
    (tmp_path / "leantune" / "demo.json").write_text("{}")
    (tmp_path / "leantune" / "checkpoint-1").mkdir()
    (tmp_path / "torch_adamw").mkdir()
    (tmp_path / "torch_adamw" / "mine.txt").write_text("keep")
    demo._prepare(tmp_path, demo.Size(1, 8, 4, 8))
    assert list((tmp_path / "leantune").iterdir()) == []
    assert (tmp_path / "torch_adamw" / "mine.txt").read_text() == "keep"
    assert len((tmp_path / "held_out.jsonl").read_text(encoding="utf-8").splitlines()) == 8


def test_exact_match_is_to_the_letter():
    rows = [{"messages": [{}, {"content": "s"}, {"content": '{"a": 1.00}'}]}] * 3
    found = demo._examined(rows, ["", "no", '{"a": 1.00}'], ['{"a": 1.00}', '{"a": 1.0}', '{"a": 1.00} '])
    assert (found["exact_before"], found["exact_after"]) == (1, 1)


def test_a_negative_number_of_steps_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="max_steps is -1"):
        demo.demo(tiny=True, output_dir=tmp_path / "out", max_steps=-1, side="")
    assert not (tmp_path / "out").exists()


def test_batched_answers_with_left_padding_are_those_of_one_row_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 6)
    folder = demo_model_path(tiny=True)
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": ""}]}
        for text in ("Short.", "A much longer sentence about a train ticket for 12 euros.")
    ]
    assert demo.answers(folder, rows, 72) == [demo.answers(folder, [row], 72)[0] for row in rows]
