"""The direction of a projection: the normalised mean of a batch's sub-tokens, the same on every process."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from leantune.activations.velora.projection import SubTokens, row_tiles
from leantune.errors import InvalidArgumentError, NonFiniteError


class FeatureSums(NamedTuple):
    """A batch of tokens, summed."""

    sums: Tensor
    """(features,), at least fp32."""
    tokens: int
    any_value: Tensor
    """bool of no dimensions: whether any of the batch's numbers is not zero."""

    @classmethod
    def of(cls, x: Tensor) -> "FeatureSums":
        """The sums of ``x`` (N, features)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        sums, any_value = x.new_zeros(x.shape[1], dtype=wide), x.new_zeros((), dtype=torch.bool)
        for rows in row_tiles(x):
            sums += rows.sum(dim=0, dtype=wide)
            any_value |= rows.any()
        return cls(sums, x.shape[0], any_value)


def mean_direction(batch: FeatureSums, cut: SubTokens, group: Any = None) -> Tensor | None:
    """v, fp32 (size,): the normalised mean of all sub-tokens of a batch.

    ``group``: a process group, over whose members' batches together the mean is taken. All must call.

    None where there is no token, or all are zero: such a batch has no direction, and its weight gradient is zero
    anyway. Raises NonFiniteError where the mean is NaN or Inf, InvalidArgumentError where sub-tokens that are not zero
    cancel; on every process alike.
    """
    tokens = batch.sums.new_tensor([batch.tokens], dtype=torch.float64)
    counted = torch.cat([batch.sums.double(), tokens, batch.any_value.double().reshape(1)])
    if group is not None:
        dist.all_reduce(counted, group=group)
    sums, (total, values) = counted[: cut.features], counted[cut.features :].tolist()
    if total == 0:
        return None
    padded = torch.nn.functional.pad(sums / total, (0, cut.groups * cut.size - cut.features))
    mean = padded.view(cut.groups, cut.size).mean(dim=0)
    norm = float(torch.linalg.vector_norm(mean))
    if norm != norm or norm == float("inf"):
        raise NonFiniteError("the first batch's activations hold NaN or Inf, so VeLoRA has no direction to project on.")
    if norm == 0:
        if values == 0:
            return None
        raise InvalidArgumentError(
            "the sub-tokens of the first training batch average to zero, so VeLoRA has no direction to project on. "
            "Leave this layer out of target_modules, or use another num_groups."
        )
    return (mean / norm).float()


def replicas(wanted: Any) -> Any:
    """The group over which directions are shared, or None where this process is alone. ``wanted``: a group, None, or
    "auto": everybody, where torch.distributed runs."""
    if wanted is None or not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if isinstance(wanted, str) else wanted
    return None if dist.get_world_size(group) == 1 else group
