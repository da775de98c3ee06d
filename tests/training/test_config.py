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
        ("--method=freeze", "write auto, full, lora or qlora"),
        ("--dtype=int8", "bfloat16"),
        ("--max_length=many", "takes int"),
        ("--betas=[0.9]", "two numbers"),
        ("--memory_budget=24", "memory_budget"),
        ("--save_total_limit=-1", "at least 1"),
        ("--max_steps=0", "at least 1"),
        ("--max_steps=-5", "at least 1"),
        ("--num_train_epochs=0", "above 0"),
        ("--seed=-1", "at least 0"),
        ("--lora_alpha=-1", "lora_alpha is -1"),
        ("--lora_dropout=2", "lora_dropout is 2.0"),
    ],
)
def test_p11_g9_wrong_keys_and_values_say_what_to_write(flag: str, words: str) -> None:
    assert words in problems(flag)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gradient_accumulation_steps=4"], "frees each gradient"),
        (["--gradient_accumulation_steps=4", "--accumulate=float16"], "float32 or bfloat16"),
        (["--accumulate=float32"], "would be ignored"),
        (["--clip=none", "--max_grad_norm=1"], "would ignore it"),
        (["--optim=adamw_torch", "--fused_backward=true"], "all gradients at once"),
        (["--optim=lomo"], "give one"),
        (["--optim=taco_one_sparse"], "give one"),
        (["--velora_target_modules=down_proj", "--gradient_checkpointing"], "saves nothing"),
        (["--bf16=true"], "autocast"),
        (["--dtype=float16", "--master_bits=24"], "master_bits is for bfloat16"),
        (["--lr=1", "--lr=2"], "--lr is given twice"),
    ],
)
def test_g1_g2_combinations_that_cannot_work_are_refused(flags: list[str], words: str) -> None:
    assert words in problems(*flags)


def test_every_problem_is_told_at_once() -> None:
    text = problems("--optim=lomo", "--clip=no", "--lora_r=0", "--method=lora", "--max_length=many", "--lr_schedulr=x")
    for words in ("optim: lomo", "clip is", "lora_r is 0", "max_length is 'many'", "unknown key 'lr_schedulr'"):
        assert text.count(words) == 1
    assert text.count("\n") == 4


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--optim=adamw", "--carry_rank=2"], "carry_rank is set, but optim: adamw does not read it"),
        (["--optim=adalomo", "--betas=0.9,0.95"], "betas is set"),
        (["--optim=taco_one_sparse", "--lr=1e-3", "--adam_epsilon=1e-6"], "adam_epsilon is set"),
        (["--optim=adamw_torch", "--rounding=nearest"], "rounding is set"),
        (["--lora_alpha=8"], "write method: lora or qlora"),
        (["--method=lora", "--bnb_4bit_quant_type=fp4"], "write method: qlora"),
        (["--method=qlora", "--bnb_4bit_quant_type=int4"], "write nf4 or fp4"),
        (["--method=qlora", "--load_in_8bit"], "write method: lora"),
        (["--load_in_4bit"], "write method: qlora"),
        (["--velora_num_groups=8"], "without velora_target_modules"),
        (["--velora_factored"], "velora_factored is set without velora_target_modules"),
        (["--velora_min_cosine=2", "--velora_target_modules=down_proj"], "a cosine above 0"),
        (["--velora_refresh_every=0", "--velora_target_modules=down_proj"], "at least 1"),
        (["--velora_factored", "--velora_target_modules=a", "--velora_refresh_every=2"], "directions that stay"),
        (["--velora_factored", "--velora_target_modules=a", "--velora_min_cosine=0.5"], "leave one of them out"),
        (["--velora_factored", "--velora_target_modules=a", "--optim=adalomo"], "adalomo's step"),
        (["--velora_factored", "--velora_target_modules=a", "--optim=adamw", "--master_bits=24"], "master_bits"),
        (["--exact_savings=swigluu"], "some of loss, swiglu"),
        (["--exact_savings=[]"], "empty list"),
        (["--exact_savings=loss,loss"], "twice"),
        (["--completion_only_loss=false"], "completions only"),
        (["--assistant_only_loss"], "assistant turns only"),
        (["--resume_from_checkpoint=x"], "write resume: true"),
        (["--label_smoothing_factor=0.1"], "label smoothing"),
        (["--fsdp=full_shard"], "write parallel"),
        (["--eval_strategy=steps"], "no held-out rows"),
    ],
)
def test_o16_g9_settings_that_would_be_ignored_are_refused(flags: list[str], words: str) -> None:
    assert words in problems(*flags)


def test_p9_packing_that_leaks_across_rows_is_refused() -> None:
    assert "attend to one another" in problems("--packing", "--packing_strategy=wrapped")


def test_g6_reentrant_checkpointing_under_fused_backward_is_refused() -> None:
    kwargs = "--gradient_checkpointing_kwargs={use_reentrant: true}"
    assert "use_reentrant" in problems("--gradient_checkpointing", kwargs)
    assert load_config(None, [*BASE, "--fused_backward=false", kwargs]).extra


def test_values_of_the_trainer_s_own_fields_are_checked_before_anything_is_loaded() -> None:
    assert "it takes linear, cosine" in problems("--lr_scheduler_type=cosin")
    assert "dataloader_num_workers" in problems("--dataloader_num_workers=two")
    config = load_config(None, [*BASE, "--warmup_steps", "3e-2", "--lr-scheduler-kwargs", "{num_cycles: 2}"])
    assert config.extra == {"warmup_steps": 0.03, "lr_scheduler_kwargs": {"num_cycles": 2}}


def test_lists_come_as_yaml_or_with_commas_and_betas_under_either_name() -> None:
    config = load_config(None, [*BASE, "--method=lora", "--lora_target_modules=q_proj,v_proj", "--betas=0.8,0.95"])
    assert config.lora_target_modules == ("q_proj", "v_proj") and config.betas == (0.8, 0.95)
    assert load_config(None, [*BASE, "--adam_beta2=0.95"]).betas == (0.9, 0.95)
    assert load_config(None, [*BASE, "--method=lora"]).lora_target_modules == "all-linear"


def test_p11_one_key_under_two_names_is_refused() -> None:
    assert "a second time" in problems("--max_length=8", "--cutoff_len=9")


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
    assert "optim: taco_one_sparse" in load_config(None, [*BASE, "--optim=taco"]).notes[0]
    assert load_config(None, [*BASE, "--optim=taco_one_sparse", "--lr=1e-3"]).fused


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
    twice = tmp_path / "twice.yaml"
    twice.write_text("seed: 1\nmax_length: 3\nseed: 2\n")
    with pytest.raises(ConfigError, match="seed stands in line 1 and in line 3"):
        load_config(twice)
    for path in (tmp_path / "none.yaml", broken):
        with pytest.raises(ConfigError, match=path.name):
            load_config(path)


def test_datasets_come_as_a_list_with_weights_and_read_back(tmp_path: Path) -> None:
    flags = ["--model_name_or_path", "m", "--dataset", "a.jsonl,b.csv", "--dataset_weights", "1,0.5"]
    config = load_config(None, [*flags, "--max_length", "auto"])
    assert config.sources == ("a.jsonl", "b.csv") and config.dataset_weights == (1.0, 0.5)
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "again.yaml") == config and "max_length: auto" in config.to_yaml()
    assert load_config(None, BASE).sources == ("d.jsonl",)
