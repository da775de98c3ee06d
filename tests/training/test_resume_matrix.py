"""Every optimizer under every method, fused and not, packed, accumulated and clipped: a run that goes on from its last
whole checkpoint, in a later epoch, ends with the weights and losses of one that was never stopped."""

import importlib.util
import itertools
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from tiny_runs import tiny_config, without_pictures, write_rows

from leantune.training import run as run_module
from leantune.training.checkpoints import checkpoints
from leantune.training.config.run_config import OUR_OPTIMIZERS
from leantune.training.run import train

QUIET = Console(quiet=True)
THEIRS = ("adamw_torch", "adafactor", "sgd")
METHODS = {"full": {}, "lora": {"method": "lora", "lora_r": 4, "lora_dropout": 0.1}, "qlora": {"method": "qlora"}}
ROWS = {
    "plain": {"per_device_train_batch_size": 4},
    "packed": {"per_device_train_batch_size": 2, "packing": True, "max_length": 48},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "packed, accumulated": {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "packing": True, "max_length": 48,
    },
}  # fmt: skip
CLIPS = ("per_tensor", "global", "none")
FAST = {("ternary_adamw", "fused", "full", "packed"), ("adamw", "ordinary", "lora", "accumulated")}
"""The others are slow tests."""


def cases() -> list:
    found = []
    for optim, method in itertools.product((*OUR_OPTIMIZERS, *THEIRS), METHODS):
        for backward in ("fused", "ordinary") if optim in OUR_OPTIMIZERS else ("ordinary",):
            for laid_out in ROWS:
                case = (optim, backward, method, laid_out)
                name = "-".join(case).replace(", ", "_")
                found.append(pytest.param(*case, id=name, marks=[] if case in FAST else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("optim", "backward", "method", "laid_out"), cases())
def test_o1_p13_a_resumed_run_is_the_same_run(
    tiny_model_path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    optim: str,
    backward: str,
    method: str,
    laid_out: str,
) -> None:
    if method == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("a 4-bit base needs bitsandbytes")
    monkeypatch.setattr(run_module, "plan_of_run", lambda *arguments: None)
    without_pictures(monkeypatch)
    more = {
        "max_length": 32,
        **METHODS[method],
        **ROWS[laid_out],
        "optim": optim,
        "fused_backward": backward == "fused",
    }
    if backward == "fused":
        accumulated = "gradient_accumulation_steps" in more
        more |= {"accumulate": "float32"} if accumulated else {}
        more["clip"] = CLIPS[(list(METHODS).index(method) + list(ROWS).index(laid_out)) % len(CLIPS)]
    rows, out = write_rows(tmp_path, 12), tmp_path / "out"
    config = tiny_config(tiny_model_path, rows, out, max_steps=6, save_steps=4, save_total_limit=5, **more)
    first = train(config, console=QUIET)
    weights = next(out / name for name in ("model.safetensors", "adapter_model.safetensors") if (out / name).exists())
    whole = weights.read_bytes()
    shutil.rmtree(out / "checkpoint-6")
    weights.unlink()
    assert [path.name for path in checkpoints(out)] == ["checkpoint-4"]
    assert json.loads((out / "checkpoint-4" / "trainer_state.json").read_text())["epoch"] > 1
    again = train(
        tiny_config(tiny_model_path, rows, out, max_steps=6, save_steps=4, resume=True, **more), console=QUIET
    )
    assert weights.read_bytes() == whole
    assert [row["loss"] for row in again.log if "loss" in row] == [row["loss"] for row in first.log if "loss" in row]
