"""The same model, rows, seed and optimizer as TRL's own SFTTrainer: the same curve of losses."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from training.tiny_runs import tiny_config, without_pictures, write_rows
from transformers import AutoModelForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

from leantune.training.run import load_rows, train

STEPS = 50


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)


def trl_losses(model_path: str, rows: str, out: Path, accumulation: int) -> list[float]:
    """The logged losses of TRL's trainer on the rows that leantune would train on."""
    config, tokenizer, data = load_rows(ours(model_path, rows, out, accumulation))
    set_seed(config.seed)
    args = SFTConfig(
        output_dir=str(out),
        learning_rate=config.rate,
        max_steps=STEPS,
        per_device_train_batch_size=config.per_device_train_batch_size,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=1.0,
        max_length=None,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=config.seed,
        data_seed=config.seed,
        bf16=False,
        gradient_checkpointing=False,
        optim="adamw_torch",
        use_cpu=True,
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    trainer = SFTTrainer(model=model, args=args, train_dataset=data.train, processing_class=tokenizer)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def ours(model_path: str, rows: str, out: Path, accumulation: int, **more: object):
    return tiny_config(
        model_path,
        rows,
        out,
        optim="adamw_torch",
        dtype="float32",
        max_steps=STEPS,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-3,
        **more,
    )


@pytest.mark.parametrize("accumulation", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_losses_are_those_of_trls_trainer(tiny_model_path: str, tmp_path: Path, accumulation: int) -> None:
    rows = write_rows(tmp_path, 24)
    theirs = trl_losses(tiny_model_path, rows, tmp_path / "trl", accumulation)
    quiet = Console(file=io.StringIO())
    for name, savings in (("plain", False), ("saving", True)):
        config = ours(tiny_model_path, rows, tmp_path / name, accumulation, exact_savings=savings)
        result = train(config, console=quiet)
        losses = [row["loss"] for row in result.log if "loss" in row]
        assert len(losses) == len(theirs) == STEPS
        assert losses[-1] < 0.8 * losses[0]
        assert losses == pytest.approx(theirs, abs=1e-5), name
