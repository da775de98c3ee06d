"""Checkpoint folders: which are whole, what each must hold before a run goes on from it, and their removal."""

import json
import os
import shutil
import zipfile
from pathlib import Path

from leantune.errors import ConfigError
from leantune.training.config import TrainConfig
from leantune.training.parallel.sharded_checkpoint import damage_of, is_sharded_checkpoint

VELORA_FILE = "velora.safetensors"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
_STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")
_PROGRESS = "trainer_state.json"


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Whole checkpoints in a folder, oldest first."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if path.name.partition("-")[2].isdigit()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written.

    >>> step_of(Path("runs/first/checkpoint-500"))
    500
    """
    return int(checkpoint.name.partition("-")[2])


def holds_model(folder: Path) -> bool:
    """Whether a folder holds the weights of a model or an adapter."""
    return any((folder / name).exists() for name in WEIGHTS)


def check_checkpoint(folder: Path, config: TrainConfig) -> None:
    """Raise ConfigError naming what a checkpoint lacks, or which of its files is cut short, before it is loaded.

    transformers goes on without a state it does not find (a fresh optimizer, another order of rows); here that is
    refused.
    """
    problems = []
    sharded = is_sharded_checkpoint(folder)
    states = _STATES[1:] if sharded else _STATES
    names = [*states, _PROGRESS, *([VELORA_FILE] if config.velora_target_modules else [])]
    if sharded and (damage := damage_of(folder)):
        problems.append(damage)
    if not sharded and not holds_model(folder):
        problems.append("the weights are missing (model.safetensors or adapter_model.safetensors)")
    present = [folder / name for name in names if (folder / name).is_file()]
    missing = [name for name in names if folder / name not in present]
    if missing:
        problems.append(f"{', '.join(missing)} missing")
    for path in [*present, *folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]:
        if damage := _damage(path):
            problems.append(f"{path.name} is damaged ({damage})")
    if problems:
        raise ConfigError(
            f"- resume: {folder} is not whole: {'; '.join(dict.fromkeys(problems))}. Going on would not continue the "
            "run. Move this folder away to resume from the checkpoint before it, or start anew in another output_dir"
        )


def at_the_end(folder: Path, config: TrainConfig) -> bool:
    """Whether a checkpoint lies where the run that ``config`` describes ends, or past it."""
    progress = json.loads((folder / _PROGRESS).read_text(encoding="utf-8"))
    if config.max_steps > 0:
        return int(progress["global_step"]) >= config.max_steps
    return float(progress.get("epoch") or 0) >= config.num_train_epochs - 1e-6


def _damage(path: Path) -> str:
    """What is wrong with a file of a checkpoint, or "". The sizes written in the files' own headers are compared."""
    try:
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            shards = set(content.get("weight_map", {}).values())
            lost = [name for name in sorted(shards) if not (path.parent / name).is_file()]
            return f"it names {lost[0]}, which is not there" if lost else ""
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, framework="pt"):
                return ""
        with zipfile.ZipFile(path):
            return ""
    except Exception as error:  # each reader has errors of its own, and all mean that the file cannot be read
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'unreadable'}"


def remove_whole(folder: Path) -> None:
    """Remove a checkpoint so that, killed in between, no part of it keeps the name of a whole one."""
    if folder.exists():
        going = folder.with_name(f".removing-{folder.name}")
        shutil.rmtree(going, ignore_errors=True)
        os.replace(folder, going)
        shutil.rmtree(going, ignore_errors=True)
