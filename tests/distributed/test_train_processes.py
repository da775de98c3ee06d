"""Whole runs in two processes equal one process with the same rows a step; they stop, resume and end together."""

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import train_runs
from processes import torchrun
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = Path(train_runs.__file__)
ALIKE = {
    "ddp_packed": 1e-5,
    "ddp_lora": 1e-5,
    "fsdp2_lora": 1e-5,
    "fsdp2_autocast": 5e-3,
    "ddp_ternary": 2e-3,
    "fsdp2_ternary": 2e-3,
}
"""Packed batches are laid out otherwise, half of an adapter starts at 0 so that its norm is what it moved, and bfloat16
rounds otherwise; the others agree to 1e-6 of a weight's norm."""


@pytest.fixture(scope="module")
def folder(tiny_model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in float32, and rows."""
    place = tmp_path_factory.mktemp("processes")
    AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32).save_pretrained(place / "model")
    AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(place / "model")
    texts = [f"Row {number} says {number * 7 % 11} and {'x' * (number % 5)}." for number in range(40)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (place / "rows.jsonl").write_text("".join(lines))
    (place / "held_out.jsonl").write_text("".join(line.replace("Row", "A row") for line in lines[:7]))
    return place


def assert_alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].double() - value.double()).norm() <= bound * value.double().norm() + 1e-12, name


def equals_one_process(folder: Path, name: str, alone: str) -> None:
    expected = train_runs.saved(folder, alone, 1)
    assert_alike(train_runs.saved(folder, name, 2), expected, ALIKE.get(name, 1e-6))


def test_g4_two_processes_train_as_one(folder: Path) -> None:
    assert torchrun(SCRIPT, 2, str(folder), "ddp", "fsdp2") == ["ddp", "fsdp2"]
    train_runs.run(folder, "ddp", 1)
    equals_one_process(folder, "ddp", "ddp")
    equals_one_process(folder, "fsdp2", "ddp")


@pytest.mark.slow
def test_g4_every_kind_of_run_trains_in_two_processes_as_in_one(folder: Path) -> None:
    names = [name for name in train_runs.CASES if name not in ("ddp", "fsdp2")]
    assert torchrun(SCRIPT, 2, str(folder), *names) == names
    for name in names:
        if name != "not_finite":
            train_runs.run(folder, name, 1)
            equals_one_process(folder, name, name)


# -- the command ------------------------------------------------------------------------------------------------------


def command(folder: Path, output: str, processes: int, *flags: str, optim: str = "ternary_adamw") -> list[str]:
    """leantune train of 40 steps with 4 rows each, a checkpoint every 10."""
    given = {
        "model_name_or_path": folder / "model", "dataset": folder / "rows.jsonl", "output_dir": folder / output,
        "dtype": "float32", "learning_rate": 1e-3, "max_length": 64, "max_steps": 40, "num_train_epochs": 10,
        "save_steps": 10, "logging_steps": 10, "per_device_train_batch_size": 4 // processes,
        "optim": optim,
    }  # fmt: skip
    pairs = [part for key, value in given.items() for part in (f"--{key}", str(value))]
    spread = ["--nproc_per_node", str(processes)] if processes > 1 else []
    return [sys.executable, "-m", "leantune", "train", *pairs, *spread, *flags]


def finish(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=300)


def stopped(arguments: list[str], checkpoint: Path, number: int, rank: int | None) -> tuple[int, str]:
    """(exit code, stderr) of a command to which, or to one of whose processes, a signal was sent once ``checkpoint``
    was there."""
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 120
        while not checkpoint.exists():
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.02)
        if rank is None:
            process.send_signal(number)
        else:
            children = psutil.Process(process.pid).children()
            os.kill(next(one.pid for one in children if one.environ().get("RANK") == str(rank)), number)
        _, said = process.communicate(timeout=120)
        return process.returncode, said


def weights(folder: Path, output: str) -> dict[str, torch.Tensor]:
    return load_file(folder / output / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_g4_accelerate_launch_trains_what_torchrun_trains(folder: Path, kind: str) -> None:
    """The command of docs/many_gpus.md, on CPUs; accelerate's own config, if there is one, is not read."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = folder / f"accelerate-{kind}.yaml"
    config.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nuse_cpu: true\n")
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config), "--cpu", "--num_processes", "2"]
    launcher += ["--num_machines", "1", "--num_cpu_threads_per_process", "1", "--mixed_precision", "no"]
    launcher += ["--main_process_port", str(port), "-m", "leantune"]
    given = command(folder, f"accelerate-{kind}", 2, "--parallel", kind)
    flags = [*given[given.index("train") : given.index("--nproc_per_node")], "--parallel", kind]
    done = finish([sys.executable, *launcher, *flags])
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    assert f"2 processes ({kind})" in " ".join(done.stdout.replace("│", " ").split())
    by_torchrun = finish(command(folder, f"torchrun-{kind}", 2, "--parallel", kind))
    assert by_torchrun.returncode == 0, by_torchrun.stderr[-3000:]
    assert_alike(weights(folder, f"accelerate-{kind}"), weights(folder, f"torchrun-{kind}"), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_g4_one_rank_is_killed_and_the_run_goes_on_bit_for_bit(folder: Path, kind: str) -> None:
    spread = ("--parallel", kind)
    whole = finish(command(folder, f"whole-{kind}", 2, *spread))
    assert whole.returncode == 0, whole.stderr[-3000:]
    arguments = command(folder, f"killed-{kind}", 2, *spread)
    first = folder / f"killed-{kind}" / "checkpoint-10"
    code, said = stopped(arguments, first, signal.SIGKILL, rank=1)
    assert code == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in said and "--resume goes on from it" in said
    again = finish([*arguments, "--resume"])
    assert again.returncode == 0, again.stderr[-3000:]
    assert_alike(weights(folder, f"killed-{kind}"), weights(folder, f"whole-{kind}"), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "processes", "rank"), [("ddp", 2, 1), ("fsdp2", 2, None), ("ddp", 1, None)])
def test_a_signal_to_any_process_saves_on_all(folder: Path, kind: str, processes: int, rank: int | None) -> None:
    output = f"stopped-{kind}-{processes}"
    arguments = command(folder, output, processes, "--parallel", kind)
    code, said = stopped(arguments, folder / output / "checkpoint-10", signal.SIGTERM, rank)
    assert code == 128 + signal.SIGTERM, said[-3000:]
    assert "stopped by SIGTERM" in said and "goes on from it" in said
    again = finish([*arguments, "--resume"])
    assert again.returncode == 0, again.stderr[-3000:]


@pytest.mark.slow
def test_a_run_saved_by_two_processes_goes_on_in_one_and_in_four(folder: Path) -> None:
    run = functools.partial(command, folder, optim="adamw")  # exact states: what is lost on the way shows
    for kind, other in (("ddp", "fsdp2"), ("fsdp2", "ddp")):
        saved = folder / f"two-{kind}"
        keep = ("--save_total_limit", "10")
        assert finish(run(saved.name, 2, "--parallel", kind, *keep)).returncode == 0
        for processes, spread in ((1, kind), (4, kind), (2, other)):
            place = folder / f"{kind}-goes-on-{processes}"
            place.mkdir()
            for name in ("leantune_config.yaml", "run_identity.json", "log.jsonl"):
                shutil.copy(saved / name, place)
            shutil.copytree(saved / "checkpoint-20", place / "checkpoint-20")
            again = finish(run(place.name, processes, "--parallel", spread, "--resume"))
            assert again.returncode == 0, again.stderr[-3000:]
            assert_alike(weights(folder, place.name), weights(folder, saved.name), 1e-4)


@pytest.mark.slow
def test_the_example_for_eight_cards_runs_on_two(folder: Path) -> None:
    given = {
        "model_name_or_path": folder / "model", "dataset": folder / "rows.jsonl", "output_dir": folder / "example",
        "max_length": 64, "max_steps": 3, "eval_split": 0.2, "nproc_per_node": 2,
    }  # fmt: skip
    pairs = [part for key, value in given.items() for part in (f"--{key}", str(value))]
    example = Path(__file__).parents[2] / "examples" / "fsdp2_8_cards.yaml"
    done = finish([sys.executable, "-m", "leantune", "train", str(example), *pairs])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "each with its rows of every weight" in " ".join(done.stdout.replace("│", " ").split())
    assert (folder / "example" / "model.safetensors").is_file()
