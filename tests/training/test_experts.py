"""Runs of a mixture of experts: TRL would switch its router's loss on, for which leantune's loss has no place."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from training.tiny_runs import tiny_config, without_pictures, write_rows
from transformers import (
    AutoModelForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

import leantune as lt
from leantune.errors import StateMismatchError
from leantune.training.run import train

COEFFICIENT = 0.003


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)


@pytest.fixture(scope="module")
def experts_path(tmp_path_factory: pytest.TempPathFactory, tiny_model_path: str) -> str:
    """A Qwen3-MoE of 2 layers and 4 experts that returns its router's logits, with the tiny model's tokenizer."""
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("tiny_experts")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=320,
        output_router_logits=True,
        router_aux_loss_coef=COEFFICIENT,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def losses(config, console=None) -> list[float]:
    result = train(config, console=console or Console(file=io.StringIO(), width=200))
    return [row["loss"] for row in result.log if "loss" in row]


@pytest.mark.parametrize("more", [{}, {"method": "lora"}, {"exact_savings": False}], ids=["full", "lora", "logits"])
def test_a_mixture_of_experts_trains(experts_path: str, tmp_path: Path, more: dict) -> None:
    words = Console(file=io.StringIO(), width=200)
    out = tmp_path / "run"
    curve = losses(tiny_config(experts_path, write_rows(tmp_path, 24), out, num_train_epochs=3, **more), words)
    assert len(curve) == 18 and curve[-1] < curve[0]
    assert "no balancing loss is added" in words.file.getvalue()
    if "method" not in more:
        kept = AutoModelForCausalLM.from_pretrained(out).config
        assert kept.router_aux_loss_coef == COEFFICIENT


def test_a_mixture_of_experts_resumes_to_the_bit(experts_path: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path, 24)
    common = {"save_steps": 3, "max_steps": 6}
    train(tiny_config(experts_path, rows, tmp_path / "whole", **common), console=Console(file=io.StringIO()))
    begun = tiny_config(experts_path, rows, tmp_path / "two", **common)
    train(begun, console=Console(file=io.StringIO()))
    for path in (tmp_path / "two" / "checkpoint-6", tmp_path / "two" / "model.safetensors"):
        remove(path)
    train(tiny_config(experts_path, rows, tmp_path / "two", resume=True, **common), console=Console(file=io.StringIO()))
    whole, two = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16).state_dict()
        for name in ("whole", "two")
    )
    assert all(torch.equal(whole[name], two[name]) for name in whole)


def test_an_attached_trainer_does_not_resume_without_the_experts(experts_path: str, tmp_path: Path) -> None:
    """transformers' own trainer would load the checkpoint by name, and leave the experts as they were."""
    rows = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 16

    def trainer(source: str, output: str) -> Trainer:
        args = TrainingArguments(
            str(tmp_path / output), max_steps=4, save_steps=2, per_device_train_batch_size=4, learning_rate=1e-3,
            report_to="none", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        made = Trainer(model, args, train_dataset=rows, data_collator=default_data_collator)
        lt.attach(made)
        return made

    whole = trainer(experts_path, "whole")
    whole.train()
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    with pytest.raises(StateMismatchError, match=r"other names in its files \(model.layers.0.mlp.experts"):
        trainer(experts_path, "other").train(resume_from_checkpoint=checkpoint)
    resumed = trainer(checkpoint, "other")
    resumed.train(resume_from_checkpoint=checkpoint)
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.model.state_dict().items())


def remove(path: Path) -> None:
    import shutil

    shutil.rmtree(path) if path.is_dir() else path.unlink()
