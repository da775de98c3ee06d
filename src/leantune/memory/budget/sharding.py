"""What of a run's memory one of several processes holds: replicas (DDP) and sharded parameters (FSDP2)."""

from collections import Counter
from dataclasses import dataclass

from leantune.errors import InvalidArgumentError
from leantune.memory.closed_form.model_shape import ModelShape
from leantune.memory.closed_form.optimizer_cost import Trained
from leantune.memory.closed_form.settings import RunSettings
from leantune.memory.closed_form.weights import WeightTable

KINDS = ("none", "ddp", "fsdp2")


@dataclass(frozen=True)
class Parallel:
    """How many processes train, and how: "none", "ddp" (each has all), "fsdp2" (each has its rows)."""

    kind: str = "none"
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidArgumentError(f"parallel is {self.kind!r}; write one of {', '.join(KINDS)}")
        if self.ranks < 1 or (self.kind == "none" and self.ranks > 1):
            raise InvalidArgumentError(
                f"{self.ranks} processes with parallel {self.kind!r}: write ddp or fsdp2, and at least 1 process"
            )

    @property
    def where(self) -> str:
        """How figures of several processes must be read; empty for one."""
        return "" if self.ranks == 1 else f", each of {self.ranks} processes ({self.kind})"


ALONE = Parallel()
"""One process."""


@dataclass(frozen=True)
class RankShare:
    """Bytes one process holds throughout a step."""

    weights: int
    adapters: int
    states: int
    gradients: int
    """Of gradients that live until the step, where they do."""
    communication: int
    """Buffers of collectives, gathered parameters and gradients that wait to be reduced."""


def rank_share(shape: ModelShape, settings: RunSettings, table: WeightTable, parallel: Parallel) -> RankShare:
    """What each process holds, the one with the most rows.

    FSDP2 shards each block's parameters by rows and the rest (embedding, last norm, head) as one group, which stays
    gathered from its forward to its backward. While a block's backward runs there are its gathered parameters, those
    of the next, gathered ahead, its whole gradients, and the buffer of the reduction before.
    """
    adapters, states, gradients = table.adapter_bytes, table.state_bytes, table.gradient_bytes
    weights = table.weight_bytes - adapters
    if parallel.kind != "fsdp2" or parallel.ranks == 1:
        # Without a fused backward DDP's reducer copies gradients into its buckets.
        buckets = gradients if parallel.kind == "ddp" and parallel.ranks > 1 and not settings.fused else 0
        return RankShare(weights, adapters, states, gradients, buckets)
    sharded = _Sharded(table, parallel.ranks)
    block = shape.block_prefix(0)
    gathered = sum(size for name, size in sharded.stored.items() if name.startswith(block))
    reduced = sum(table[name].gradient_bytes for name in sharded.stored if name.startswith(block))
    root = sum(size for name, size in sharded.stored.items() if not name.startswith("model.layers."))
    return RankShare(
        weights=sharded.weights + table.weight_bytes - sum(sharded.stored.values()),
        adapters=sharded.adapters,
        states=sharded.states,
        gradients=sharded.gradients,
        communication=root + 2 * gathered + 2 * reduced,
    )


class _Sharded:
    """Parameters, states and gradients of the fullest process: its rows, rounded up."""

    def __init__(self, table: WeightTable, ranks: int) -> None:
        self.stored: dict[str, int] = {}
        self.weights = self.adapters = self.states = self.gradients = 0
        kinds: Counter[Trained] = Counter()
        for name, size in table.shapes.items():
            share = -(-size[0] // ranks) / size[0]
            stored = table.stored[name]
            self.stored[name] = stored
            local = int(stored * share)
            if ".lora_" in name:
                self.adapters += local
            else:
                self.weights += local
            if table[name].trained:
                self.gradients += int(table[name].gradient_bytes * share)
                kinds[Trained(size, table.dtypes[name], "embed_tokens" in name)] += 1
        for trained, number in kinds.items():
            share = -(-trained.shape[0] // ranks) / trained.shape[0]
            local, everywhere = table.cost.layout_bytes(trained)
            self.states += number * (int(local * share) + everywhere)
