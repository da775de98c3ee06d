"""The arms of quality_velora.py on a tiny Llama: what each trains, and what it keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from memory.tiny_llama import tiny_llama, tokens

ROOT = Path(__file__).resolve().parents[2]
QKV = ("q_proj", "k_proj", "v_proj")


@pytest.fixture(autouse=True)
def _benchmarks_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def layers() -> Any:
    from quality.velora_methods import Layers

    adapted = (*QKV, "o_proj", "gate_proj", "up_proj", "down_proj")
    return Layers(QKV, 8, adapted, checkpoints=True, variants={"paper": ("down_proj",)})


def step(method: str) -> tuple[float, dict[str, torch.Tensor]]:
    from quality.velora_methods import ABLATIONS, ARMS, prepare

    torch.manual_seed(0)
    arm = prepare(tiny_llama(), (ARMS | ABLATIONS)[method], layers(), 1e-2, "bf16", 0)
    before = {name: weight.detach().clone() for name, weight in arm.model.named_parameters()}
    loss = arm.model(**tokens(2, 40)).loss
    loss.backward()
    arm.optimizer.step()
    after = dict(arm.model.named_parameters())
    return loss.item(), {name: after[name] for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("method", ["full-plain", "checkpoint", "velora", "velora-factored", "velora-on-paper"])
def test_arms_of_the_whole_model_begin_with_its_loss_and_move_its_weights(method: str) -> None:
    loss, moved = step(method)
    full, all_moved = step("full")
    assert loss == full
    assert {name for name in all_moved if not name.endswith("norm.weight")} <= {*moved}


@pytest.mark.parametrize("method", ["lora", "lora+velora", "qlora", "qlora+velora"])
def test_arms_with_adapters_move_adapters_alone(method: str) -> None:
    if method.startswith("q"):
        pytest.importorskip("bitsandbytes")
    _, moved = step(method)
    assert moved and all("lora_" in name and weight.dtype == torch.float32 for name, weight in moved.items())


def test_an_arm_needs_what_the_task_has() -> None:
    from quality.velora_methods import ABLATIONS, ARMS, Layers

    bare = Layers(("0",), 4)
    assert not ARMS["lora"].possible(bare) and not ARMS["checkpoint"].possible(bare)
    assert not ABLATIONS["velora-on-paper"].possible(bare) and ARMS["velora"].possible(bare)
