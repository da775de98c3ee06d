"""A config is checked as a whole, and says what to write instead."""

from pathlib import Path

import pytest

from leantune.errors import ConfigError
from leantune.training.config import load_config

BASE = ["--model_name_or_path", "m", "--dataset", "d.jsonl"]


def problems(*flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*BASE, *flags])
    return str(caught.value)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--learning-rat=1", "learning_rate"),
        ("--velora_target_module=x", "velora_target_modules"),
        ("--per_device_train_batchsize=1", "per_device_train_batch_size"),
        ("--warmup_ratio=0.1", "warmup_steps"),
        ("--device_map=auto", "one device per process"),
        ("--optim_args=x", "write the setting itself"),
        ("--optim=ternary_adam", "ternary_adamw"),
        ("--method=qlora", "write full, or lora"),
        ("--dtype=int8", "bfloat16"),
        ("--max_length=many", "takes int"),
        ("--betas=[0.9]", "two numbers"),
        ("--memory_budget=24", "memory_budget"),
    ],
)
def test_p11_g9_wrong_keys_and_values_say_what_to_write(flag: str, words: str) -> None:
    assert words in problems(flag)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gradient_accumulation_steps=4"], "frees each gradient"),
        (["--clip=none", "--max_grad_norm=1"], "would ignore it"),
        (["--optim=adamw_torch", "--fused_backward=true"], "all gradients at once"),
        (["--optim=lomo"], "give one"),
        (["--velora_target_modules=down_proj", "--gradient_checkpointing"], "saves nothing"),
        (["--bf16=true"], "autocast"),
    ],
)
def test_g1_g2_combinations_that_cannot_work_are_refused(flags: list[str], words: str) -> None:
    assert words in problems(*flags)


def test_every_problem_is_told_at_once() -> None:
    text = problems("--optim=lomo", "--clip=no", "--lora_r=0")
    assert text.count("\n") == 2


def test_p11_aliases_are_taken_with_a_note() -> None:
    config = load_config(
        None, [*BASE, "--cutoff_len=64", "--micro-batch-size", "2", "--torch_dtype=float32", "--sample_packing"]
    )
    assert (config.max_length, config.per_device_train_batch_size, config.dtype, config.packing) == (
        64,
        2,
        "float32",
        True,
    )
    assert "cutoff_len is read as max_length" in config.notes
    assert "one-sparse" in load_config(None, [*BASE, "--optim=taco"]).notes[0]


def test_flags_override_the_file_and_the_resolved_config_reads_back(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\ndataset: d\nlearning_rate: 1e-4\nlr_scheduler_type: cosine\n")
    config = load_config(file, ["--learning_rate", "2e-4", "--velora_target_modules", "down_proj,up_proj"])
    assert config.learning_rate == 2e-4 and config.extra == {"lr_scheduler_type": "cosine"}
    assert config.velora_target_modules == ("down_proj", "up_proj")
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert load_config(again) == config


def test_defaults_follow_what_was_asked() -> None:
    assert load_config(None, BASE).fused and load_config(None, BASE).clip_mode == "per_tensor"
    assert load_config(None, [*BASE, "--max_grad_norm=0.5"]).clip_mode == "global"
    assert not load_config(None, [*BASE, "--optim=adamw_torch"]).fused


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [1")
    for path in (tmp_path / "none.yaml", broken):
        with pytest.raises(ConfigError, match=path.name):
            load_config(path)
