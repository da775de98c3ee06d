"""Gradient accumulation under a fused backward: sums that live from the first micro-batch to the last."""

import torch
from torch import Tensor

from leantune.codec.counter_hash import high_half, random_bits, splitmix64
from leantune.codec.rounding import round_stochastic_
from leantune.errors import InvalidArgumentError
from leantune.optim.row_shard import local, row_shard

KINDS = ("float32", "bfloat16")
_CHUNK = 1 << 18


class Accumulator:
    """The sum of each parameter's gradients over micro-batches.

    Args:
        kind: "float32": exact, 4 bytes a parameter (on float32 weights, what ``.grad`` itself would hold);
            "bfloat16": stochastically rounded after each addition, 2 bytes a parameter; its expectation is exact.
    """

    def __init__(self, kind: str) -> None:
        if kind not in KINDS:
            raise InvalidArgumentError(f"accumulate is {kind!r}; write 'float32' (exact) or 'bfloat16' (rounded).")
        self.dtype = torch.float32 if kind == "float32" else torch.bfloat16
        self.sums: dict[Tensor, Tensor] = {}

    def add(self, param: Tensor, grad: Tensor, key: int) -> None:
        """``grad`` may be kept. ``key``: of the random bits of this parameter and micro-batch."""
        if param not in self.sums:
            if grad.dtype is self.dtype:
                self.sums[param] = grad
                return
            self.sums[param] = torch.zeros_like(grad, dtype=self.dtype)
        total = self.sums[param]
        if self.dtype is torch.float32:
            total.add_(grad)
            return
        key ^= row_shard(param).first_row
        parts = local(total).view(-1).split(_CHUNK), local(grad).reshape(-1).split(_CHUNK)
        for number, (mine, more) in enumerate(zip(*parts, strict=True)):
            bits = random_bits(splitmix64(key), number, 1, 0, 1, mine.numel(), mine.device).view(-1)
            mine.copy_(round_stochastic_(mine.float().add_(more), torch.bfloat16, high_half(bits)))
