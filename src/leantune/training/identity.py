"""What a resumed run must share with the run it goes on from, so that it continues and does not start something
else."""

import hashlib
import json
import math
from array import array
from pathlib import Path
from typing import Any

from leantune.errors import StateMismatchError
from leantune.training.config import TrainConfig
from leantune.training.data.load import PreparedData
from leantune.training.parallel.processes import current_processes
from leantune.whole_file import write_whole

IDENTITY_FILE = "run_identity.json"
_SETTINGS = (
    "method", "longest_first", "optim", "dtype", "bf16", "max_length", "packing", "per_device_train_batch_size",
    "gradient_accumulation_steps", "seed", "fused", "accumulate", "clip_mode", "max_grad_norm", "carry_rank",
    "momentum_planes", "block_size", "rounding", "master_bits", "velora_target_modules", "velora_num_groups",
    "velora_factored", "velora_refresh_every", "lora_r",
    "lora_alpha", "lora_dropout", "lora_target_modules", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant",
    "load_in_8bit", "rate", "weight_decay", "betas", "adam_epsilon",
)  # fmt: skip
_DEALT = ("processes", "per_device_train_batch_size", "gradient_accumulation_steps")
"""Their product is the rows of a step."""
_EXTRA = (
    "lr_scheduler_type",
    "warmup_steps",
    "packing_strategy",
    "data_seed",
    "shuffle_dataset",
    "dataloader_drop_last",
    "train_sampling_strategy",
)


def identity(config: TrainConfig, data: PreparedData) -> dict[str, Any]:
    """Settings that decide order, batches and state, and a digest of the tokenised rows. JSON-ready."""
    values: dict[str, Any] = {key: getattr(config, key) for key in _SETTINGS}
    values |= {key: config.extra[key] for key in _EXTRA if key in config.extra}
    values = json.loads(json.dumps(values))
    values["processes"] = current_processes(False).size
    return {**values, "rows": data.rows, "data": data.digest or _digest(data.train)}


def write_identity(config: TrainConfig, data: PreparedData, folder: Path) -> None:
    """Leave what `check_identity` compares with in ``folder``."""
    write_whole(folder / IDENTITY_FILE, json.dumps(identity(config, data), indent=2) + "\n")


def check_identity(config: TrainConfig, data: PreparedData, folder: Path) -> None:
    """Raise StateMismatchError naming every difference between this run and the one whose checkpoints lie in
    ``folder``.

    Number of steps, evaluation and logging may change, and the number of processes where a step has as many rows as
    before. Rates, betas and weight decay lie in the saved states of
    optimizer and scheduler, which a resumed run continues: other values in the config would be ignored.
    """
    path = folder / IDENTITY_FILE
    if not path.is_file():
        return
    before, now = json.loads(path.read_text(encoding="utf-8")), identity(config, data)
    before.setdefault("processes", 1)
    # Another number of processes goes on with the same rows in each step, dealt in another way.
    dealt = _DEALT if before["processes"] != now["processes"] and _rows_a_step(before) == _rows_a_step(now) else ()
    different = [
        f"- {key} was {before.get(key)!r} and is {now.get(key)!r}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key) and key not in ("data", *dealt)
    ]
    if before.get("data") != now["data"]:
        different.append("- the training rows are others than those it was started with")
    if different:
        raise StateMismatchError(
            f"this is not the run whose checkpoints are in {folder}:\n"
            + "\n".join(different)
            + "\nGive the settings and the data "
            f"it was started with ({folder / 'leantune_config.yaml'}), or another output_dir to start anew."
        )


def trained_on_others(config: TrainConfig, data: PreparedData, folder: Path) -> bool:
    """Whether the run in ``folder`` was trained on other rows than those of ``data``, as far as its files say."""
    path = folder / IDENTITY_FILE
    return path.is_file() and json.loads(path.read_text(encoding="utf-8"))["data"] != identity(config, data)["data"]


def _rows_a_step(values: dict[str, Any]) -> int:
    return math.prod(int(values[key]) for key in _DEALT)


def _digest(rows: Any) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(array("q", row["input_ids"]).tobytes())
        digest.update(array("q", row["labels"]).tobytes())
    return digest.hexdigest()
