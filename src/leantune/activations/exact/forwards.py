"""What the ``forward`` of a module becomes under exact savings: one class for each kind of module.

Each calls the module's own forward and changes nothing about what it computes. They are plain objects with a reference
to their module, so a deep copy or a pickle of the model has its own, at work, for its own modules.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from leantune.activations.exact.ledger import Ledger
from leantune.activations.exact.recipe import Part, Recipe, as_in_forward
from leantune.activations.exact.region import Region
from leantune.activations.exact.scope import can_run, running
from leantune.activations.random_state import dropped_from, mask_bytes, random_state, state_bytes

Keeps = Literal["input", "result", "intermediates"]
"""What an activation saves for its backward."""


class SavingForward:
    """Base: the module, the forward it had, and the bytes of its last training forward."""

    saving = ""
    """The argument of ``apply_exact_savings`` that switches it."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.replaced = module.__dict__.get("forward")
        self.ledger = Ledger()
        self.recomputed = False
        """The last forward ran inside backward: gradient checkpointing's."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not can_run():
            return self.original(*args, **kwargs)
        self.ledger = Ledger()
        self.recomputed = torch._C._current_graph_task_id() != -1
        return self.saving_forward(*args, **kwargs)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that the module had."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def saving_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same, with fewer bytes saved."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"ledger": Ledger()}


class BlockForward(SavingForward):
    """A feed-forward block: where activations, their products and the projections that read those meet."""

    saving = "swiglu"

    def saving_forward(self, *args: Any, **kwargs: Any) -> Any:
        with running(self.ledger):
            return self.original(*args, **kwargs)


class FamilyForward(BlockForward):
    """The module around layers with adapters."""

    saving = "shared_adapter_input"


class AdapterForward(SavingForward):
    """A layer with low-rank adapters: copies of its input in the adapters' dtype can be made again from it."""

    saving = "shared_adapter_input"

    def saving_forward(self, *args: Any, **kwargs: Any) -> Any:
        with running(self.ledger, adapter=True):
            return self.original(*args, **kwargs)


class ActivationForward(SavingForward):
    """An elementwise activation inside a block: its result can be made again from its input.

    Where it keeps its result anyway (ReLU, tanh), that stays, and only products with it can be made again. Where it
    keeps intermediate steps, those are made again as well.
    """

    saving = "swiglu"

    def __init__(self, name: str, module: nn.Module, keeps: Keeps) -> None:
        super().__init__(name, module)
        self.keeps = keeps

    def saving_forward(self, x: Tensor) -> Tensor:
        with running(self.ledger) as scope:
            again = as_in_forward(self.original, x.device)
            if self.keeps == "intermediates":
                region = Region(lambda tensor: again(tensor.detach().requires_grad_()), (scope.part(x),))
                with scope.region(region):
                    y: Tensor = self.original(x)
            else:
                y = self.original(x)
            scope.learn(y, None if self.keeps == "result" else Recipe(again, (scope.part(x),)))
        return y


class DropoutForward(SavingForward):
    """``nn.Dropout``: its mask is drawn again from the generator's state, and so is the dropped copy of an adapter's
    input."""

    saving = "dropout"

    def saving_forward(self, x: Tensor) -> Tensor:
        p = float(self.module.p)  # type: ignore[arg-type]
        size = state_bytes(x.device)
        if not self.module.training or not 0 < p < 1 or size is None or mask_bytes(x) <= size:
            y: Tensor = self.original(x)
            return y
        state = random_state(x)
        layout, device, dtype = (tuple(x.shape), x.stride()), x.device, x.dtype

        def dropped(state: Tensor, x: Tensor) -> Tensor:
            return dropped_from(state, x, p)

        def mask(state: Tensor) -> Tensor:
            return dropped(state, torch.empty_strided(*layout, dtype=dtype, device=device).requires_grad_())

        with running(self.ledger) as scope:
            with scope.region(Region(mask, (Part.of(state),))):
                y = self.original(x)
            if scope.adapters:
                scope.learn(y, Recipe(dropped, (Part.of(state), scope.part(x))))
        return y
