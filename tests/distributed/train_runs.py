"""What torchrun starts in every process of test_train_processes.py: whole runs of a tiny model.

torchrun --nproc_per_node 2 train_runs.py FOLDER CASE...
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from leantune.errors import NonFiniteError
from leantune.training.config import build_config
from leantune.training.log import RunLog
from leantune.training.run import TrainResult, train
from leantune.training.trainer import LeanTrainer

STEPS, ROWS_A_STEP = 4, 8
RULE = {"optim": "adamw", "clip": "global"}
TERNARY = {"optim": "ternary_adamw", "dtype": "bfloat16", "learning_rate": 1e-4}
LORA = {"method": "lora", "lora_r": 4}
CASES: dict[str, dict[str, object]] = {
    "ddp": {},
    "fsdp2": {"parallel": "fsdp2"},
    "ddp_ordinary": {"fused_backward": False},
    "ddp_torch": {"optim": "adamw_torch", "fused_backward": False, "clip": None},
    "ddp_accumulated": {"accumulate": "float32", "gradient_accumulation_steps": 2},
    "ddp_packed": {"packing": True, "max_length": 48},
    "ddp_checkpointed": {"gradient_checkpointing": True},
    "ddp_streamed": {"streaming": True, "eval_split": None, "eval_dataset": "held_out.jsonl"},
    "ddp_lora": LORA,
    "ddp_velora": {"velora_target_modules": ["down_proj"], "velora_num_groups": 8},
    "ddp_factored": {"velora_target_modules": ["down_proj"], "velora_num_groups": 8, "velora_factored": True},
    "ddp_taco": {"optim": "taco_one_sparse"},
    "fsdp2_ordinary": {"parallel": "fsdp2", "fused_backward": False},
    "fsdp2_logits": {"parallel": "fsdp2", "exact_savings": False},
    "fsdp2_per_tensor": {"parallel": "fsdp2", "clip": "per_tensor"},
    "fsdp2_accumulated": {"parallel": "fsdp2", "accumulate": "float32", "gradient_accumulation_steps": 2},
    "fsdp2_checkpointed": {"parallel": "fsdp2", "gradient_checkpointing": True},
    "fsdp2_lora": {"parallel": "fsdp2", **LORA},
    "fsdp2_velora": {"parallel": "fsdp2", "velora_target_modules": ["down_proj"], "velora_num_groups": 8},
    "fsdp2_autocast": {"parallel": "fsdp2", "bf16": True},
    "ddp_ternary": TERNARY,
    "fsdp2_ternary": {"parallel": "fsdp2", **TERNARY},
    "not_finite": {},
}


def run(folder: Path, name: str, processes: int, **more: object) -> TrainResult:
    """A case's run in this process, one of ``processes``: the same rows in each step, whatever their number."""
    RunLog.plot = lambda *arguments: None  # type: ignore[method-assign]
    values: dict[str, object] = {
        "model_name_or_path": str(folder / "model"), "dataset": str(folder / "rows.jsonl"), "dtype": "float32",
        "output_dir": str(folder / f"{name}-{processes}"), "learning_rate": 1e-3, "max_length": 64,
        "max_steps": STEPS, "save_steps": 100, "eval_split": 0.2, **RULE, **CASES[name], **more,
    }  # fmt: skip
    micro_batches = int(str(values.get("gradient_accumulation_steps", 1)))
    values["per_device_train_batch_size"] = ROWS_A_STEP // processes // micro_batches
    if "eval_dataset" in values:
        values["eval_dataset"] = str(folder / str(values["eval_dataset"]))
    if processes == 1:
        values.pop("parallel", None)
    values = {key: value for key, value in values.items() if value is not None}
    return train(build_config(values), console=Console(quiet=True))


def saved(folder: Path, name: str, processes: int) -> dict[str, Tensor]:
    """The weights a case's run has written."""
    output = folder / f"{name}-{processes}"
    file = "adapter_model.safetensors" if (output / "adapter_model.safetensors").exists() else "model.safetensors"
    return load_file(output / file)


def same_everywhere(result: TrainResult) -> None:
    for name, param in result.model.named_parameters():
        if not hasattr(param, "device_mesh"):
            everybody = [torch.empty_like(param) for _ in range(dist.get_world_size())]
            dist.all_gather(everybody, param.detach())
            assert all(torch.equal(everybody[0], other) for other in everybody), name


def not_finite_on_one(folder: Path) -> None:
    """The loss of process 1 is not a number in its third step: both stop there, nothing moved."""
    ours = LeanTrainer.compute_loss

    def compute_loss(self: LeanTrainer, *arguments: Any, **more: Any) -> Tensor:
        loss = ours(self, *arguments, **more)
        return loss * float("nan") if self.state.global_step == 2 and dist.get_rank() == 1 else loss

    LeanTrainer.compute_loss = compute_loss  # type: ignore[method-assign]
    try:
        run(folder, "not_finite", 2)
    except NonFiniteError as error:
        assert "step 3" in str(error) and "nothing was updated" in str(error)
        assert ("another process" in str(error)) == (dist.get_rank() == 0)
    else:
        raise AssertionError("training went on")
    finally:
        LeanTrainer.compute_loss = ours  # type: ignore[method-assign]


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        if name == "not_finite":
            not_finite_on_one(folder)
            if dist.get_rank() == 0:
                print(f"done: {name}", flush=True)
            continue
        result = run(folder, name, int(os.environ["WORLD_SIZE"]))
        same_everywhere(result)
        assert result.held_out_before is not None and result.held_out_after is not None
        if dist.get_rank() == 0:
            assert (result.output_dir / "summary.json").is_file()
            print(f"done: {name}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
