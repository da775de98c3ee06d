"""Whole runs on quantised bases: adapters alone move, nothing is upcast, resuming continues bit for bit."""

import functools
import math
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny_runs import tiny_config, without_pictures, write_rows

from leantune.errors import ConfigError
from leantune.training.run import train

pytest.importorskip("bitsandbytes")
QUIET = Console(quiet=True)
config = functools.partial(tiny_config, max_length=32, save_steps=2, max_steps=4, lora_r=4, save_total_limit=10)


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    without_pictures(monkeypatch)
    return write_rows(tmp_path, 12)


_QKV = ["q_proj", "k_proj", "v_proj"]


@pytest.mark.parametrize(
    "more",
    [
        {"method": "qlora", "velora_target_modules": _QKV, "velora_num_groups": 4, "lora_dropout": 0.1},
        {"method": "lora", "load_in_8bit": True, "optim": "adamw_torch"},
    ],
)
def test_a1_a4_adapters_alone_train_and_resuming_is_bit_exact(
    tiny_model_path: str, rows: str, tmp_path: Path, more: dict[str, object]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    result = train(config(tiny_model_path, rows, whole, **more), console=QUIET)
    losses = [row["loss"] for row in result.log if "loss" in row]
    assert all(math.isfinite(loss) for loss in losses)
    original = load_file(Path(tiny_model_path) / "model.safetensors")
    embeddings = result.model.get_base_model().get_input_embeddings().weight
    assert embeddings.dtype == torch.bfloat16 and torch.equal(embeddings, original["model.embed_tokens.weight"])
    adapters = load_file(whole / "adapter_model.safetensors")
    assert all(value.dtype == torch.float32 for value in adapters.values())  # TRL would round them to bfloat16
    assert all(value.abs().sum() > 0 for name, value in adapters.items() if "lora_B" in name)
    assert result.plan is not None and result.memory_by_part["weights"] == result.plan.parts["weights"]
    if result.velora is not None:
        assert result.velora.saved_bytes > 0
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / "checkpoint-4")
    (broken / "adapter_model.safetensors").unlink()
    train(config(tiny_model_path, rows, broken, resume=True, **more), console=QUIET)
    resumed = load_file(broken / "adapter_model.safetensors")
    assert all(torch.equal(value, resumed[name]) for name, value in adapters.items())


def test_a1_checkpointing_over_frozen_embeddings_reaches_every_adapter(
    tiny_model_path: str, rows: str, tmp_path: Path
) -> None:
    more = {"method": "qlora", "gradient_checkpointing": True, "max_steps": 1}
    train(config(tiny_model_path, rows, tmp_path / "out", **more), console=QUIET)
    adapters = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all(value.abs().sum() > 0 for name, value in adapters.items() if "lora_B" in name)


def test_a_missing_bitsandbytes_is_said_before_anything_is_loaded(
    tiny_model_path: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.utils.import_utils.is_bitsandbytes_available", lambda *version: False)
    with pytest.raises(ConfigError, match=r"pip install 'leantune\[qlora\]'"):
        train(config(tiny_model_path, rows, tmp_path / "out", method="qlora"), console=QUIET)
    assert not (tmp_path / "out").exists()
