"""Whole runs of a tiny model: what is written, what is logged, and that resuming continues bit for bit."""

import functools
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_runs import tiny_config, without_pictures, write_rows
from transformers import AutoModelForCausalLM

from leantune.errors import ConfigError, NonFiniteError, NotEnoughRoomError
from leantune.training.checkpoints import checkpoints
from leantune.training.run import train
from leantune.training.trainer import LeanTrainer

QUIET = Console(quiet=True)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return write_rows(tmp_path, 20)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)


config = functools.partial(tiny_config, max_length=64, save_steps=3, max_steps=8, save_total_limit=10)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_a_run_writes_a_model_a_log_plots_and_reports(tiny_model_path: str, rows: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    velora = {"velora_target_modules": ["q_proj", "k_proj", "v_proj"], "velora_num_groups": 4}
    result = train(config(tiny_model_path, rows, out, eval_split=0.2, **velora), console=QUIET)
    for name in (
        "model.safetensors",
        "tokenizer.json",
        "loss.png",
        "memory.png",
        "memory_plan.json",
        "memory_profile.json",
        "summary.json",
        "curves.png",
        "run_card.md",
        "leantune_config.yaml",
    ):
        assert (out / name).stat().st_size > 0
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    steps = [row for row in log if "loss" in row]
    assert len(steps) == 8 and all(row["grad_norm"] > 0 for row in steps)  # G5
    assert all(0 < share <= 100 for row in steps for share in row["moved_pct"])  # O21
    assert result.held_out_after < result.held_out_before
    assert result.memory_by_part["weights"] > 0 and result.velora.saved_bytes > 0
    saved = weights(out)
    assert all(torch.equal(value, saved[name]) for name, value in result.model.state_dict().items() if name in saved)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("optim", ["ternary_adamw", "adamw"])
def test_p13_resuming_across_an_epoch_continues_bit_for_bit(
    tiny_model_path: str, rows: str, tmp_path: Path, optim: str, packing: bool
) -> None:
    more = {"optim": optim, "packing": packing, "velora_target_modules": ["down_proj"]}
    train(config(tiny_model_path, rows, tmp_path / "whole", **more), console=QUIET)
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "whole", broken)
    for name in ("checkpoint-6", "checkpoint-8"):
        shutil.rmtree(broken / name, ignore_errors=True)
    (broken / "model.safetensors").unlink()
    train(config(tiny_model_path, rows, broken, resume=True, **more), console=QUIET)
    whole, resumed = weights(tmp_path / "whole"), weights(broken)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.usefixtures("no_pictures")
def test_p12_a_killed_run_resumes_to_the_same_weights(tiny_model_path: str, rows: str, tmp_path: Path) -> None:
    out, whole = tmp_path / "killed", tmp_path / "whole"
    more = {"max_steps": 24, "save_steps": 3}
    flags = [f"--{key}={value}" for key, value in {
        "model_name_or_path": tiny_model_path, "dataset": rows, "output_dir": out,
        "learning_rate": 1e-3, "max_length": 64,
        "per_device_train_batch_size": 4, "save_total_limit": 10, **more,
    }.items()]  # fmt: skip
    command = [sys.executable, "-c", "from leantune.cli import main; main()", "train", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while not (out / "checkpoint-6").exists() and time.time() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (out / "checkpoint-6").exists() and not (out / "model.safetensors").exists()
    train(config(tiny_model_path, rows, out, resume=True, **more), console=QUIET)
    train(config(tiny_model_path, rows, whole, **more), console=QUIET)
    expected, resumed = weights(whole), weights(out)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


@pytest.mark.usefixtures("no_pictures")
def test_p6_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(
    tiny_model_path: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = LeanTrainer.compute_loss

    def spoiled(self, *arguments, **more):
        loss = compute(self, *arguments, **more)
        return loss * float("nan") if self.state.global_step == 4 and self.model.training else loss

    monkeypatch.setattr(LeanTrainer, "compute_loss", spoiled)
    out = tmp_path / "out"
    with pytest.raises(NonFiniteError, match=r"step 5 .*checkpoint-3"):
        train(config(tiny_model_path, rows, out), console=QUIET)
    assert (out / "checkpoint-3" / "model.safetensors").exists()


@pytest.mark.usefixtures("no_pictures")
def test_the_loss_without_logits_trains_as_full_logits_do(tiny_model_path: str, rows: str, tmp_path: Path) -> None:
    losses = []
    for exact in (True, False):
        more = {"exact_savings": exact, "dtype": "float32", "optim": "adamw", "clip": "none"}
        result = train(config(tiny_model_path, rows, tmp_path / str(exact), **more), console=QUIET)
        losses.append([row["loss"] for row in result.log if "loss" in row])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_p9_packing_does_not_leak_across_rows(tiny_model_path: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    first, second = torch.arange(5, 15), torch.arange(30, 42)
    alone = model.get_decoder()(input_ids=second[None]).last_hidden_state
    places = torch.cat([torch.arange(10), torch.arange(12)])[None]
    packed = model.get_decoder()(input_ids=torch.cat([first, second])[None], position_ids=places, use_cache=False)
    torch.testing.assert_close(packed.last_hidden_state[:, 10:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("optim", ["ternary_adamw", "adamw_torch"])
def test_lora_trains_adapters_alone(tiny_model_path: str, rows: str, tmp_path: Path, optim: str) -> None:
    more = {"method": "lora", "lora_r": 4, "optim": optim, "max_steps": 3}
    train(config(tiny_model_path, rows, tmp_path / "out", **more), console=QUIET)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.usefixtures("no_pictures")
def test_an_old_run_is_not_overwritten_and_a_budget_is_held(tiny_model_path: str, rows: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(NotEnoughRoomError, match="memory_budget is 100KiB"):
        train(config(tiny_model_path, rows, out, memory_budget="100KiB", method="full"), console=QUIET)
    train(config(tiny_model_path, rows, out, max_steps=3), console=QUIET)
    with pytest.raises(ConfigError, match="resume: true"):
        train(config(tiny_model_path, rows, out, max_steps=3), console=QUIET)
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        train(config(tiny_model_path, rows, tmp_path / "none", resume=True), console=QUIET)
    assert checkpoints(out)[-1].name == "checkpoint-3"
