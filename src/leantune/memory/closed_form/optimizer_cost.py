"""Bytes of optimizer states and of update temporaries from shapes: ours by their own layouts, others by their rules."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from leantune.errors import InvalidArgumentError
from leantune.memory.closed_form.settings import ITEM_BYTES
from leantune.memory.closed_form.state_bytes import TILE_ELEMENTS, state_bytes

STEP_COUNT_BYTES = 8
"""A parameter's step count, an int64 on the host, which ``report()`` leaves out; beside a GPU it is not counted."""
RULES = {
    "ternary_adamw": ("leantune.optim.ternary_adamw", "TernaryAdamW"),
    "adamw": ("leantune.optim.adamw", "AdamW"),
    "lomo": ("leantune.optim.lomo", "Lomo"),
    "adalomo": ("leantune.optim.adalomo", "AdaLomo"),
    "taco_one_sparse": ("leantune.optim.taco_one_sparse", "TacoOneSparse"),
}
"""leantune's optimizers by their names in a config."""
MOMENTS = {
    "adamw_torch": 2,
    "adamw_torch_fused": 2,
    "sgd": 0,
    "adagrad": 1,
    "rmsprop": 1,
    "lion_32bit": 1,
    "adamw_apex_fused": 2,
}
"""States of the weight's shape and dtype that transformers' other optimizers keep."""
EIGHT_BIT = {"adamw_bnb_8bit": 2, "adamw_8bit": 2, "paged_adamw_8bit": 2, "lion_8bit": 1}
"""bitsandbytes: states of a byte an element and an fp32 scale for every 256; fp32 below 4,096 elements, and for
embeddings, as transformers sets it."""
_SMALL = 4096
_SCALE_BLOCK = 256
_WHOLE_GRADIENTS = ("taco_one_sparse",)
"""Rules that cannot take a gradient in tiles."""
_TILES = {"ternary_adamw": 0, "adamw": 7, "lomo": 3, "adalomo": 5.1, "taco_one_sparse": 9}
"""fp32 tiles of 2^17 elements that a rule holds at once (ternary states run in kernels, which need none)."""


class Trained(NamedTuple):
    """A kind of trained parameter."""

    shape: tuple[int, ...]
    dtype: str
    embedding: bool = False


@dataclass(frozen=True)
class OptimizerCost:
    """Costs of the optimizer ``name`` of a config with ``options``, its settings.

    Raises InvalidArgumentError for an optimizer whose states are not known here.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in RULES and self.name not in MOMENTS and self.name not in EIGHT_BIT:
            known = ", ".join((*RULES, *MOMENTS, *EIGHT_BIT))
            raise InvalidArgumentError(f"the states of optim {self.name} are not known in closed form (known: {known})")

    @property
    def ours(self) -> bool:
        """Whether it is one of leantune's."""
        return self.name in RULES

    @property
    def tileable(self) -> bool:
        """Whether it can take a head's gradient in tiles."""
        return self.ours and self.name not in _WHOLE_GRADIENTS

    def all_at_once(self, cuda: bool) -> bool:
        """Whether one step's temporaries span all parameters: torch's foreach kernels."""
        return cuda and self.name == "adamw_torch"

    def state_bytes(self, parameters: "Counter[Trained]", *, on_host: bool) -> int:
        """Bytes of all states; ``parameters`` counts those trained. ``on_host``: step counts of 8 bytes lie in the same
        memory."""
        return sum(number * self._one(trained, on_host) for trained, number in parameters.items())

    def layout_bytes(self, trained: Trained) -> tuple[int, int]:
        """(bytes sharded with a parameter's rows, bytes that every rank keeps) of one parameter's state."""
        if not self.ours:
            return self._one(trained, False), 0
        found = state_bytes(self.name, self.options, trained.shape, trained.dtype)
        return self._by_the_rule(trained) if found is None else found

    def _one(self, trained: Trained, on_host: bool) -> int:
        shape, dtype = trained.shape, trained.dtype
        count = math.prod(shape)
        if self.ours:
            return sum(self.layout_bytes(trained)) + (STEP_COUNT_BYTES if on_host else 0)
        if self.name in EIGHT_BIT:
            moments = EIGHT_BIT[self.name]
            if count < _SMALL or trained.embedding:
                return moments * 4 * count
            return moments * (count + 4 * -(-count // _SCALE_BLOCK))
        return MOMENTS[self.name] * ITEM_BYTES[dtype] * count + (4 if self.name.startswith("adamw_torch") else 0)

    def _by_the_rule(self, trained: Trained) -> tuple[int, int]:
        """As `layout_bytes`, from the optimizer itself; it refuses settings that cannot work."""
        from importlib import import_module

        import torch

        module, name = RULES[self.name]
        param = torch.nn.Parameter(torch.empty(trained.shape, dtype=getattr(torch, trained.dtype), device="meta"))
        optimizer = getattr(import_module(module), name)([param], **{"lr": 1e-3, **self.options})
        layout = optimizer._layout(param, optimizer.param_groups[0])
        sizes = {key: math.prod(shape) * dtype.itemsize for key, (shape, dtype) in layout.tensors.items()}
        whole = sum(sizes[key] for key in layout.replicated if key in sizes)
        return sum(sizes.values()) - whole, whole

    def update_bytes(self, shape: tuple[int, ...], dtype: str, cuda: bool) -> int:
        """Temporaries of one parameter's update."""
        count = math.prod(shape)
        if self.ours:
            return int(_TILES[self.name] * 4 * min(count, TILE_ELEMENTS))
        # The root of the second moment; a CPU's loop holds it twice for a moment.
        return count * ITEM_BYTES[dtype] * (1 if cuda else 2) if self.name == "adamw_torch" else 0
