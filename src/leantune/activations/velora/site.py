"""A site: one input that a layer would keep for the gradient of one weight, and its projection instead."""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from leantune.activations.exact.scope import kept_for
from leantune.activations.velora.direction import mean_direction, replicas
from leantune.activations.velora.product import Product, Projected
from leantune.activations.velora.projection import kept_energy
from leantune.errors import InvalidTypeError

UNDER_CHECKPOINTING = (
    "VeLoRA layers lie in blocks under gradient checkpointing, which keeps none of their inputs between forward and "
    "backward: VeLoRA saves nothing there but while a block is recomputed, and approximates weight gradients all the "
    "same. Leave these layers out of target_modules, or do not checkpoint their blocks."
)


@dataclass
class Source:
    """A tensor that the plain layer would keep: the input, or what exact savings keep to make it again."""

    storage: StorageWeakRef
    nbytes: int
    held: bool = False
    """Something else still held it when backward came."""


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
        self.rehearses: str | None = None  # "plain" or "projected": a forward that leaves no trace, of a probe
        self.tokens = self.mask_bytes = self.kept_bytes = 0  # of the last training forward
        self.energy: Tensor | None = None
        self.cosine: float | None = None
        self.given: StorageWeakRef | None = None  # the layer's own input
        self.sources: list[Source] = []
        self.remade = False  # exact savings would make the input again from the sources
        self.copied = False  # the sources are a copy of the layer's input, which nobody else reads
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
        if self.exact or self.rehearses == "plain" or not (trains and self.module.training and torch.is_grad_enabled()):
            return self.product.plain(x, weight, bias)
        device = x.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x = x.to(dtype)  # as torch's own linear would cast it
            with torch.autocast(device, enabled=False):
                return self._project(x, weight, bias, dtype)
        return self._project(x, weight, bias, None)

    def direction(self, x: Tensor, shared: bool = True) -> Tensor | None:
        """The mean direction of a batch, over the processes that share v if ``shared``. Raises as `mean_direction`."""
        group = replicas(self.process_group) if shared else None
        return mean_direction(self.product.feature_sums(x), self.product.cut, group)

    def _project(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        inside = x.detach()
        # A rehearsal, or a trace on tensors without data, must neither set the direction nor leave measurements.
        trace = x.is_meta or isinstance(x, FakeTensor) or self.rehearses is not None
        if (self.v is None or self.refresh_every is not None) and not trace:
            self._settle(inside)
        if self.v is None or x.is_meta or isinstance(x, FakeTensor):
            v = inside.new_zeros((self.product.cut.size,), dtype=torch.float32)
        else:
            if self.v.device != x.device:  # the model was moved
                self.v = self.v.to(x.device)
            v = self.v
        with torch.no_grad():
            z = self.product.project(inside, v)
        watches = not (trace or torch.compiler.is_compiling())
        if watches:
            self._note(x, z)
            if self.factor is not None:
                self.factor.check_ready()
        coefficients, norms = (None, None) if self.factor is None else self.factor.of(self, v)
        y: Tensor = Projected.apply(x, weight, bias, coefficients, norms, z, v, self.product, dtype)
        if watches:
            y.register_hook(partial(_look_whether_held, self.sources))
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

    def _note(self, x: Tensor, z: Tensor) -> None:
        """What the report tells of this forward. Before the layer runs: checkpointing may end a recomputation at the
        last tensor saved, inside it."""
        self.recomputed = torch._C._current_graph_task_id() != -1
        if self.recomputed:
            warnings.warn(UNDER_CHECKPOINTING, stacklevel=2)  # shown once
        self.tokens = x.numel() // self.product.cut.features
        self.kept_bytes = z.nbytes
        kept = kept_for(x)
        self.sources = [Source(StorageWeakRef(t.untyped_storage()), t.numel() * t.itemsize) for t in kept]
        addresses = {source.storage.cdata for source in self.sources}
        self.remade = x.untyped_storage()._cdata not in addresses
        self.copied = self.given is not None and self.given.cdata not in addresses


def _look_whether_held(sources: list[Source], grad: Tensor) -> None:
    for source in sources:
        source.held = not source.storage.expired()
