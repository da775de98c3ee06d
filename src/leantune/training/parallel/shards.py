"""FSDP2: a causal language model cut by rows over the processes, and put together again."""

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from leantune.backward.reduction import replicate
from leantune.errors import ConfigError
from leantune.optim.row_shard import is_sharded, whole_tensor
from leantune.training.parallel.sharded_checkpoint import is_sharded_checkpoint

if TYPE_CHECKING:
    from leantune.training.parallel.processes import Processes

L = TypeVar("L", bound="Loaded")
LOSS = "_leantune_loss"
"""The method of a sharded model in which the loss without logits is computed: as in its forward, FSDP2 has gathered
what lies outside of the blocks, the head too."""


class Loaded(Protocol):
    """What was loaded: ``model`` is what is spread."""

    @property
    def model(self) -> Any: ...


def load_spread(load: Callable[[], L], processes: "Processes", resume_from: Path | None) -> L:
    """What ``load`` gives, every process with its part of the model: the weights of the first one, or rows of them.

    Models to be cut are loaded one process after another, so that the host holds one whole at a time. ``resume_from``:
    a checkpoint whose adapters are loaded before the model is cut.
    """
    if processes.kind != "fsdp2":
        loaded = load()
        if processes.kind == "ddp":
            if torch.cuda.is_available():
                loaded.model.to(torch.device("cuda", torch.cuda.current_device()))
            replicate(loaded.model)
        return loaded
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (processes.size,))
    for turn in range(processes.size):
        if turn == processes.rank:
            loaded = load()
            adapted = hasattr(loaded.model, "peft_config")
            if adapted and resume_from is not None and not is_sharded_checkpoint(resume_from):
                loaded.model.load_adapter(str(resume_from), loaded.model.active_adapter, is_trainable=True)
            shard(loaded.model, mesh)
        processes.wait()
    return loaded


def shard(model: nn.Module, mesh: Any) -> None:
    """Cut the parameters of a causal language model (adapters and all) by rows over ``mesh``, in place: each block is
    gathered for its forward and its backward, the rest from forward to backward.

    Every process must hold the same weights. Raises ConfigError where the blocks are not known.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    from leantune.training.trainer import base_model, summed_loss

    inner: Any = base_model(model)
    names = set(getattr(inner, "_no_split_modules", None) or ())
    blocks = [module for module in inner.modules() if type(module).__name__ in names]
    if not blocks:
        raise ConfigError(
            f"- parallel: fsdp2 cuts a model block by block, and {type(inner).__name__} does not say what its blocks "
            "are (_no_split_modules); write parallel: ddp"
        )
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(inner, mesh=mesh, reshard_after_forward=False)

    def loss(self: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return summed_loss(model, inputs, True)

    setattr(inner, LOSS, MethodType(loss, inner))
    register_fsdp_forward_method(inner, LOSS)


def holds_shards(model: nn.Module) -> bool:
    """Whether a model's parameters are sharded."""
    return any(is_sharded(param) for param in model.parameters())


def reshard(model: nn.Module) -> None:
    """Free what a forward without backward has left gathered, so that parameters are the sharded ones again."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def gathered(model: nn.Module, keep: bool, trained_only: bool) -> dict[str, Tensor]:
    """Every parameter whole, on the CPU, by name; tied ones once. All processes must call this; where ``keep`` is
    False, the result is empty. ``trained_only``: adapters without their base."""
    found = {}
    for name, param in model.named_parameters():
        if trained_only and not param.requires_grad:
            continue
        value = whole_tensor(param.detach()).cpu()
        if keep:
            found[name] = value
    return found
