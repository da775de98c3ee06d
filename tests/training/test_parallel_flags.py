"""What is refused of several processes before any is started, and what the command says of one that failed."""

import os
import signal
from pathlib import Path

import pytest

from leantune.errors import ConfigError
from leantune.training.config import build_config
from leantune.training.parallel import launch as launching
from leantune.training.parallel.launch import going_on, launch, take_nproc
from leantune.training.parallel.processes import Processes, join_processes, launcher_problems

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
