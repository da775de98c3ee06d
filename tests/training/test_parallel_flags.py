"""What is refused of several processes before any is started, and what the command says of one that failed."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiny_runs import tiny_config, write_rows
from transformers import AutoModelForCausalLM, TrainingArguments

from leantune.errors import ConfigError
from leantune.training import run as run_module
from leantune.training.config import build_config, load_config
from leantune.training.parallel import launch as launching
from leantune.training.parallel.launch import going_on, launch, take_nproc
from leantune.training.parallel.processes import Processes, join_processes, launcher_problems
from leantune.training.summary import facts

GIVEN = {"model_name_or_path": "m", "dataset": "d", "optim": "adamw"}


def test_the_number_of_processes_is_taken_out_of_the_flags() -> None:
    assert take_nproc(["a.yaml", "--nproc_per_node=4", "--resume"]) == (4, ["a.yaml", "--resume"])
    assert take_nproc(["--nproc-per-node", "2"]) == (2, [])
    assert take_nproc(["a.yaml"]) == (None, ["a.yaml"])


@pytest.mark.parametrize("given", [["--nproc_per_node"], ["--nproc_per_node", "0"], ["--nproc_per_node", "gpu"]])
def test_a_number_that_is_none_is_refused(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        take_nproc(given)


def test_a_process_of_a_launcher_starts_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="of a launcher already"):
        launch(2, [], "out")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"parallel": "fsdp"}, "its second version is meant by fsdp2"),
        ({"parallel": "tp"}, "write ddp"),
        ({"parallel": "fsdp2", "method": "qlora"}, "4-bit base are packed"),
        ({"parallel": "fsdp2", "method": "lora", "load_in_8bit": True}, "8-bit base are packed"),
        ({"parallel": "fsdp2", "optim": "adamw_torch"}, "not tested on sharded weights"),
        ({"parallel": "fsdp2", "optim": "taco_one_sparse", "learning_rate": 1e-3}, "whole columns"),
        ({"parallel": "fsdp2", "velora_target_modules": "down_proj", "velora_factored": True}, "whole weights"),
        ({"parallel": "ddp", "velora_target_modules": "down_proj", "velora_min_cosine": 0.5}, "different ones"),
        ({"fsdp": "full_shard"}, "write parallel: ddp or fsdp2"),
        ({"deepspeed": "zero.json"}, "write parallel: ddp or fsdp2"),
        ({"average_tokens_across_devices": False}, "weighs the same"),
    ],
)
def test_what_cannot_work_is_refused_by_name(more: dict[str, object], said: str) -> None:
    from leantune.training.config.read import _canonical

    problems: list[str] = []
    values = _canonical({**GIVEN, **more}, problems, [])
    with pytest.raises(ConfigError, match=said):
        build_config(values, problems)


def test_what_processes_cannot_share_is_refused_where_a_launcher_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    velora = {"velora_target_modules": "down_proj", "velora_min_cosine": 0.5}
    with pytest.raises(ConfigError, match="velora_min_cosine"):
        join_processes(build_config({**GIVEN, **velora}))


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed precision fp16"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "bf16: true"),
    ],
)
def test_an_accelerate_config_that_would_be_ignored_is_refused(environment: dict[str, str], said: str) -> None:
    (problem,) = launcher_problems(environment, build_config(GIVEN))
    assert said in problem
    assert not launcher_problems({"ACCELERATE_MIXED_PRECISION": "no"}, build_config(GIVEN))


def test_one_process_is_alone() -> None:
    alone = join_processes(build_config({**GIVEN, "parallel": "fsdp2"}))
    assert alone == Processes() and alone.first
    assert alone.total(3.0) == 3.0 and alone.gather("x") == ["x"] and alone.any(True)


def test_the_rank_that_was_killed_is_named_before_those_that_missed_it(tmp_path: Path) -> None:
    assert launching._root({0: 1, 2: -signal.SIGKILL, 1: -signal.SIGTERM}, 0) == 2
    assert launching._root({0: 1, 1: -signal.SIGTERM}, 0) == 0
    failed = launching._failure(2, -signal.SIGKILL, "", str(tmp_path))
    assert "rank 2 was killed by SIGKILL" in str(failed) and failed.exit_code == 128 + signal.SIGKILL
    assert "start it again" in str(failed)
    os.mkdir(tmp_path / "checkpoint-7")
    assert "checkpoint-7" in going_on(str(tmp_path))
    said = launching._failure(1, 1, "  ValueError: no", str(tmp_path))
    assert "exit code 1" in str(said) and "ValueError: no" in str(said) and said.exit_code == 1


def test_p14_two_visible_gpus_and_plain_python_are_one_device_and_the_header_says_so(
    tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs as torch reports them; the trainer is not built, or its model would be moved to one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *arguments: True)
    # What transformers settles on where nothing is launched: the first GPU, and a copy of the model on every one.
    monkeypatch.setattr(TrainingArguments, "_setup_devices", property(two_gpus))
    built: dict[str, Any] = {}
    monkeypatch.setattr(run_module, "LeanTrainer", lambda *lean, **arguments: built.update(arguments) or Mock())
    config = tiny_config(tiny_model_path, write_rows(tmp_path, 8), tmp_path / "out", max_length=32)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    loaded = SimpleNamespace(model=model, savings=SimpleNamespace(loss=True, lines=list), velora=None)
    data = SimpleNamespace(train=None, held_out=None, lengths=None, rows=8, longest=9)
    run_module.build_trainer(config, loaded, None, data)
    args = built["args"]
    assert (args.n_gpu, args.train_batch_size, args.device) == (1, 4, torch.device("cuda", 0))
    trainer = SimpleNamespace(model=model, optimizer=built["optimizers"][0], args=args, processes=Processes())
    said = facts(config, trainer, data, loaded.savings)["device"]
    assert said == "cuda:0, one a process; 2 GPUs are visible, --nproc_per_node 2 trains on all"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert facts(config, trainer, data, loaded.savings)["device"] == "cuda:0, one a process"


def two_gpus(args: TrainingArguments) -> torch.device:
    if not hasattr(args, "_n_gpu") or args._n_gpu == -1:
        args._n_gpu = 2
    return torch.device("cuda", 0)


def test_p14_a_model_is_never_split_over_devices_by_layers(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model_name_or_path: m\ndataset: d\ndevice_map: auto\n")
    with pytest.raises(ConfigError, match=r"device_map.*one device per process, always"):
        load_config(tmp_path / "run.yaml")
