"""docs/tested_models.md: every architecture of its table goes through `leantune train` as the table says.

A new architecture is a config in tests/activations/tiny_architectures.py, a name in `DECODERS`, and a line on the page.
"""

import io
from pathlib import Path

import pytest
import torch
from activations.tiny_architectures import ARCHITECTURES, build
from conftest import tiny_tokenizer
from rich.console import Console
from training.tiny_runs import tiny_config, without_pictures, write_rows
from transformers import AutoModelForCausalLM

import leantune as lt
from leantune.training.run import train

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tested_models.md"
DECODERS = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Gemma3", "Phi3", "GPT2", "Qwen3Moe", "Mixtral")
MODES = {
    "full": {},
    "VeLoRA": {"velora_num_groups": 8},
    "LoRA": {"method": "lora"},
    "QLoRA": {"method": "qlora"},
    "packing": {"packing": True},
}
VELORA_TARGETS = {"GPT2": "c_attn", "Phi3": "qkv_proj"}
CLOSED = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma3", "Mixtral", "Qwen3Moe")
"""Planned in closed form; the others are traced."""
EXPERTS = ("Qwen3Moe", "Mixtral")


def outcome(architecture: str, mode: str) -> str:
    """What the page says."""
    return "yes, experts stay in 16 bits" if architecture in EXPERTS and mode == "QLoRA" else "yes"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, str] = {}

    def path(architecture: str) -> str:
        if architecture not in made:
            folder = tmp_path_factory.mktemp(architecture)
            tokenizer = tiny_tokenizer()
            model = build(architecture, torch.bfloat16)
            model.resize_token_embeddings(320)
            model.config.eos_token_id, model.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
            model.generation_config.eos_token_id = tokenizer.eos_token_id
            model.generation_config.pad_token_id = tokenizer.pad_token_id
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            made[architecture] = str(folder)
        return made[architecture]

    return path


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", DECODERS)
def test_an_architecture_trains(
    architecture: str, mode: str, model_path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pictures(monkeypatch)
    keys = dict(MODES[mode]) | {"max_length": 64, "max_steps": 12, "learning_rate": 3e-3}
    if mode == "VeLoRA":
        keys["velora_target_modules"] = [
            VELORA_TARGETS.get(architecture, "q_proj"),
            *([] if architecture in VELORA_TARGETS else ["k_proj", "v_proj"]),
        ]
    words = Console(file=io.StringIO(), width=200)
    config = tiny_config(model_path(architecture), write_rows(tmp_path, 24), tmp_path / "run", **keys)
    result = train(config, console=words)
    losses = [row["loss"] for row in result.log if "loss" in row]
    assert len(losses) == 12 and losses[-1] < losses[0]
    if mode in ("full", "VeLoRA", "packing"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "run", dtype=torch.bfloat16)
        trained = result.model.state_dict()
        assert all(torch.equal(value, trained[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize("architecture", DECODERS)
def test_an_architecture_is_planned(architecture: str, model_path) -> None:
    config = tiny_config(model_path(architecture), "rows.jsonl", Path("unused"), max_length=64)
    plan = lt.plan(config, advice=False)
    traced = any("closed form" in note for note in plan.notes)
    assert traced != (architecture in CLOSED), plan.notes


def page_lines() -> list[str]:
    heading = "| architecture | plan | " + " | ".join(MODES) + " |"
    lines = [heading, "|" + "---|" * (len(MODES) + 2)]
    for architecture in DECODERS:
        tier = "closed form" if architecture in CLOSED else "traced"
        lines.append(f"| {architecture} | {tier} | " + " | ".join(outcome(architecture, mode) for mode in MODES) + " |")
    return lines


def test_the_page_has_this_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert "\n".join(page_lines()) in text
    assert all(name in text for name in ARCHITECTURES)
