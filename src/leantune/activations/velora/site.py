"""A site: one input that a layer would keep for the gradient of one weight, and its projection instead."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from leantune.activations.velora.direction import mean_direction, replicas
from leantune.activations.velora.product import Product, Projected
from leantune.activations.velora.projection import kept_energy
from leantune.errors import InvalidTypeError


class Site:
    """Calling a site with x gives the product's Y; in training batches Z is kept for backward instead of x.

    Args:
        name: of the site, unique in the model: the layer's name, and more where a layer has several.
        module: holds the weight and the bias.
        product: how they are multiplied.
        weight, bias: names of the parameters in ``module``.
    """

    def __init__(
        self, name: str, module: nn.Module, product: Product, weight: str = "weight", bias: str = "bias"
    ) -> None:
        self.name, self.module, self.product = name, module, product
        self.weight_name, self.bias_name = weight, bias
        self.v: Tensor | None = None
        self.exact = False  # chosen by the user after a probe: the input is kept
        self.refresh_every: int | None = None
        self.process_group: Any = "auto"
        self.forwards = 0  # training forwards since the beginning, counted where v is refreshed
        self.factor: Any = None  # leantune.activations.velora.factored.Factor
        self.probe: Any = None  # leantune.activations.velora.probe.Probe, for the length of one
        self.tokens = self.exact_bytes = self.kept_bytes = 0  # of the last training forward
        self.energy: Tensor | None = None
        self.cosine: float | None = None
        self.source: StorageWeakRef | None = None  # the input's storage; None where a cast copy would have been kept
        self.held = False  # something else still held the input when backward came
        self.recomputed = False  # the last forward was gradient checkpointing's, inside backward

    def __deepcopy__(self, memo: dict[int, Any]) -> "Site":
        raise InvalidTypeError(
            "a model under VeLoRA cannot be deep-copied: the copy's layers would write to the original's projection. "
            "Call handle.remove() first, copy, and apply_velora to both."
        )

    @property
    def weight(self) -> Tensor:
        """The weight as it is in forward: unsharded under FSDP2."""
        weight: Tensor = getattr(self.module, self.weight_name)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """The bias, or None."""
        bias: Tensor | None = getattr(self.module, self.bias_name)
        return bias

    def __call__(self, x: Tensor) -> Tensor:
        """Y. A batch that trains the weight goes through the projection; any other is exact."""
        weight, bias = self.weight, self.bias
        if self.probe is not None:
            y: Tensor = self.probe.run(self, x, weight, bias)
            return y
        trains = weight.requires_grad or self.factor is not None
        if self.exact or not (trains and self.module.training and torch.is_grad_enabled()):
            return self.product.plain(x, weight, bias)
        device = x.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x = x.to(dtype)  # as torch's own linear would cast it
            with torch.autocast(device, enabled=False):
                return self._project(x, weight, bias, dtype)
        return self._project(x, weight, bias, None)

    def direction(self, x: Tensor) -> Tensor | None:
        """The mean direction of a batch over the processes that share v. See `mean_direction` for what it raises."""
        return mean_direction(self.product.feature_sums(x), self.product.cut, replicas(self.process_group))

    def _project(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        inside = x.detach()
        trace = x.is_meta or isinstance(x, FakeTensor)  # must neither set the direction nor leave measurements
        if (self.v is None or self.refresh_every is not None) and not trace:
            self._settle(inside)
        if trace or self.v is None:
            v = inside.new_zeros((self.product.cut.size,), dtype=torch.float32)
        else:
            v = self.v if self.v.device == x.device else self._move(x.device)
        with torch.no_grad():
            z = self.product.project(inside, v)
        watches = not (trace or torch.compiler.is_compiling())
        if watches:
            self._note(x, z)
        coefficients, norms = (None, None) if self.factor is None else self.factor.of(self, x.device)
        y: Tensor = Projected.apply(x, weight, bias, coefficients, norms, z, v, self.product, dtype)
        if watches and self.source is not None:
            y.register_hook(partial(_look_whether_held, self, self.source))
        return y

    @torch.compiler.disable
    def _settle(self, x: Tensor) -> None:
        """Set the direction where there is none, or where it is to be refreshed."""
        recomputes = torch._C._current_graph_task_id() != -1
        due = self.v is None
        if self.refresh_every is not None and not recomputes:
            due = due or self.forwards % self.refresh_every == 0
            self.forwards += 1
        if due:
            v = self.direction(x)
            if v is not None:
                self.v = v
                self.energy = kept_energy(x, self.product.project(x, v))

    @torch.compiler.disable
    def _move(self, device: torch.device) -> Tensor:
        moved = self.v.to(device) if self.v is not None else torch.zeros(0)
        self.v = moved
        return moved

    def _note(self, x: Tensor, z: Tensor) -> None:
        """What the report tells of this forward. Before the layer runs: checkpointing may end a recomputation at the
        last tensor saved, inside it."""
        self.recomputed = torch._C._current_graph_task_id() != -1
        self.tokens = x.numel() // self.product.cut.features
        self.exact_bytes, self.kept_bytes = x.numel() * x.itemsize, z.nbytes
        self.source = StorageWeakRef(x.untyped_storage())


def _look_whether_held(site: Site, source: StorageWeakRef, grad: Tensor) -> None:
    site.held = not source.expired()
