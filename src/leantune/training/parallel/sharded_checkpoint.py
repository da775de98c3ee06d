"""What a checkpoint of sharded parameters holds, by torch.distributed.checkpoint: it is read by any number of
processes, and by one alone."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

SHARDED = "sharded"
"""The folder inside of a checkpoint."""


def is_sharded_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint's weights and states are in shards."""
    return (folder / SHARDED).is_dir()


def damage_of(folder: Path) -> str:
    """What is wrong with the shards of a checkpoint, or ""."""
    try:
        metadata: Any = dcp.FileSystemReader(str(folder / SHARDED)).read_metadata()
    except Exception as error:  # unpickling has many errors, and all mean that it cannot be read
        return f"{SHARDED}/.metadata cannot be read ({type(error).__name__})"
    ends: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        path = folder / SHARDED / name
        if not path.is_file():
            return f"{SHARDED}/{name} is missing"
        if path.stat().st_size < end:
            return f"{SHARDED}/{name} is cut short ({path.stat().st_size:,} of {end:,} bytes)"
    return ""


def save_sharded(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Every process writes its rows of trained parameters and states into ``folder``/sharded; ``optimizer``: None
    before the first step."""
    saved: dict[str, Any] = {"model": trained(model)}
    if optimizer is not None:
        saved["optimizer"] = get_optimizer_state_dict(model, optimizer)
    dcp.save(saved, checkpoint_id=str(folder / SHARDED))


def load_sharded_model(folder: Path, model: nn.Module) -> None:
    """Trained parameters, in place, whether this process holds rows of them or all."""
    dcp.load({"model": trained(model)}, checkpoint_id=str(folder / SHARDED), no_dist=_alone())


def load_sharded_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's states and groups."""
    saved = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(saved, checkpoint_id=str(folder / SHARDED), no_dist=_alone())
    set_optimizer_state_dict(model, optimizer, saved["optimizer"])


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters by name, tied ones once, sharing their memory."""
    return {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}


def _alone() -> bool:
    return not dist.is_initialized()
