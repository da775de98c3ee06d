"""What `apply_velora` gives back: the layers it changed, their directions, their report, and the way back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from leantune.activations.exact.find import is_adapter
from leantune.activations.velora.direction import replicas
from leantune.activations.velora.factored import attach_optimizer
from leantune.activations.velora.layer import Layer
from leantune.activations.velora.probe import Loss, ProbeReport, probe_sites
from leantune.activations.velora.report import VeloraReport, VeloraRow
from leantune.activations.velora.site import Site
from leantune.errors import InvalidArgumentError, StateMismatchError
from leantune.kernels.half_linear import needs_fp32_products

_FORWARDS, _FOLDS, _EXACT = ".forwards", ".folds", ".exact"
"""What follows a site's name in the keys of its counters."""


class VeloraHandle:
    """The layers that :func:`leantune.apply_velora` changed."""

    def __init__(self, model: nn.Module, layers: list[Layer]) -> None:
        self._model, self._layers = model, layers
        self._ends: list[Callable[[], None]] = []
        self._trained = {name for name, module in model.named_modules() if _keeps_input(module)}

    @property
    def names(self) -> list[str]:
        """Names of the layers."""
        return [layer.name for layer in self._layers]

    @property
    def sites(self) -> list[Site]:
        """The projected inputs, layer by layer; most kinds have one a layer, recurrent cells two."""
        return [site for layer in self._layers for site in layer.sites]

    def predicted_bytes(self, tokens: int) -> tuple[int, int]:
        """(exact, kept) bytes of all layers for a forward over ``tokens`` tokens in the weights' dtype."""
        exact = sum(tokens * site.product.cut.features * site.weight.itemsize for site in self.sites)
        return exact, sum(tokens * site.product.cut.groups * site.weight.itemsize for site in self.sites)

    def report(self) -> VeloraReport:
        """What is saved, site by site, after exact savings and what others keep anyway: bytes of the last training
        forward, kept energy of the batch that set v, cosine of the last probe."""
        rows: list[VeloraRow] = []
        counted: set[int] = set()
        for layer in self._layers:
            for site in layer.sites:
                energy = None if site.energy is None else float(site.energy)
                cut = site.product.cut
                sizes = (cut.features, cut.size, cut.groups, site.tokens, _exact_bytes(site, counted), site.kept_bytes)
                block = checkpointed_block(self._model, site.name)
                kept_by = self._kept_by(layer.name, site, block)
                rows.append(VeloraRow(site.name, *sizes, energy, kept_by, site.cosine, site.exact, block))
        return VeloraReport(rows)

    def probe(self, model: nn.Module, batch: Any, loss: Loss, min_cosine: float | None = None) -> ProbeReport:
        """How well the approximate weight gradients point the way of the exact ones on a batch, and the bytes really
        saved: two forwards to count bytes, and one forward and backward of plain layers.

        Args:
            model: in training mode. Its weights, gradients, buffers, directions and random state stay as they are, and
                no hook of a parameter runs.
            batch: whatever ``loss`` takes.
            loss: (model, batch) -> scalar loss.
            min_cosine: layers whose cosine is lower keep their exact gradient from now on; under data parallel by the
                mean over all processes, which all must call. None: nothing is changed.

        A layer without a direction yet is measured with this batch's own, which is not kept. Costs, for a moment, one
        layer's exact gradient in fp32. Raises InvalidArgumentError for a model in evaluation mode, or a ``min_cosine``
        with ``factored=True``, whose weights are frozen.
        """
        if min_cosine is not None and any(site.factor is not None for site in self.sites):
            raise InvalidArgumentError(
                "min_cosine lets layers go back to exact gradients, and factored=True has frozen their weights. Probe "
                "without min_cosine, and apply_velora anew without the layers whose cosine is low."
            )
        report = probe_sites(self.sites, model, batch, loss)
        for site, row in zip(self.sites, report.rows):
            site.cosine = row.cosine
        if min_cosine is not None:
            for site, cosine in zip(self.sites, self._shared_cosines()):
                site.exact = cosine is not None and cosine < min_cosine
        return report

    def _shared_cosines(self) -> list[float | None]:
        """Mean over the processes that share v."""
        groups = {site.process_group for site in self.sites}
        group = replicas(next(iter(groups))) if groups else None
        if group is None:
            return [site.cosine for site in self.sites]
        found = [[site.cosine or 0.0, float(site.cosine is not None)] for site in self.sites]
        sums = torch.tensor(found, dtype=torch.float64, device=self.sites[0].weight.device)
        dist.all_reduce(sums, group=group)
        return [float(total / count) if count else None for total, count in sums.tolist()]

    def use_fp32_products(self) -> None:
        """Multiply narrow operands in fp32, as :mod:`leantune.kernels.half_linear` does for plain layers on such
        CPUs."""
        for site in self.sites:
            if hasattr(site.product, "wide"):
                cpu = site.weight.device.type == "cpu"
                site.product.wide = cpu and needs_fp32_products(site.weight.dtype)

    def attach(self, optimizer: Optimizer) -> None:
        """With ``factored=True``: let the steps of ``optimizer`` reach the weights. For each optimizer that has some of
        the layers' parameters, once, before training.

        Raises InvalidArgumentError or InvalidTypeError for an optimizer that has none of them, or whose step is not
        known to be one on the whole gradient; nothing is changed.
        """
        factors = [site.factor for site in self.sites if site.factor is not None]
        if not factors:
            raise InvalidArgumentError("attach(optimizer) is for apply_velora(..., factored=True).")
        self._ends.append(attach_optimizer(factors, optimizer))

    def remove(self) -> None:
        """Restore every layer exactly as it was.

        Raises StateMismatchError, nothing changed, where something else has replaced a layer's forward since.
        """
        for layer in self._layers:
            layer.check_on_top()
        for end in self._ends:
            end()
        for site in self.sites:
            if site.factor is not None:
                site.factor.remove()
        for layer in self._layers:
            layer.leave()
        self._layers, self._ends = [], []

    def state_dict(self) -> dict[str, Tensor]:
        """What a run needs to go on: of every site that has one its direction, fp32 (sub-token size,), by its name (no
        entry: not set yet), and int64: forwards where directions are refreshed, steps where factored, 1 where exact."""
        state = {site.name: site.v.clone() for site in self.sites if site.v is not None}
        return state | {name: torch.tensor(count) for name, count in self._counters().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore `state_dict`; raises StateMismatchError, nothing changed, where a name or size does not fit."""
        shapes: dict[str, tuple[int, ...]] = {site.name: (site.product.cut.size,) for site in self.sites}
        shapes |= dict.fromkeys(self._counters(), ())
        shapes |= {site.name + _EXACT: () for site in self.sites}
        for name, value in state.items():
            if name not in shapes or tuple(value.shape) != shapes[name]:
                raise StateMismatchError(
                    f"saved VeLoRA state {name} has shape {tuple(value.shape)}, here: {shapes.get(name, 'none such')}. "
                    "Apply VeLoRA with the target_modules, num_groups, refresh_every and factored it was saved with."
                )
        for site in self.sites:
            v = state.get(site.name)
            site.v = None if v is None else v.to(site.weight.device, torch.float32, copy=True)
            site.exact = bool(state.get(site.name + _EXACT, 0))
            site.forwards = int(state.get(site.name + _FORWARDS, 0))
            if site.factor is not None:
                site.factor.folds = int(state.get(site.name + _FOLDS, 0))

    def _counters(self) -> dict[str, int]:
        counted = {site.name + _EXACT: 1 for site in self.sites if site.exact}
        counted |= {site.name + _FORWARDS: site.forwards for site in self.sites if site.refresh_every is not None}
        return counted | {site.name + _FOLDS: site.factor.folds for site in self.sites if site.factor is not None}

    def save(self, path: str | Path) -> None:
        """Write `state_dict` to a safetensors file."""
        from safetensors.torch import save_file

        save_file(self.state_dict(), str(path))

    def load(self, path: str | Path) -> None:
        """Read what :meth:`save` wrote."""
        from safetensors.torch import load_file

        self.load_state_dict(load_file(str(path)))

    def _kept_by(self, layer: str, site: Site, block: str | None) -> str | None:
        """Who keeps the input whatever VeLoRA does: a checkpointed block makes it again; a trained sibling outside the
        targets, by the usual names, reads the same tensor and no copy of its own; something still held it when backward
        came (a ReLU keeps its output), or all that exact savings make it again from."""
        if site.recomputed or block is not None:
            return "made again by gradient checkpointing"
        parent, _, own = layer.rpartition(".")
        siblings = next((family for family in _SHARED_INPUTS if own in family), ())
        names = {f"{parent}.{name}".lstrip(".") for name in siblings if name != own}
        others = sorted((names - set(self.names)) & self._trained)
        if others and not site.copied:
            return f"kept by {', '.join(name.rpartition('.')[2] for name in others)}"
        if not site.sources or not all(source.held for source in site.sources):
            return None
        return "made again by exact savings" if site.remade else "kept by another operator"


def _keeps_input(module: nn.Module) -> bool:
    """Whether a layer keeps its input: it is trained, or an adapter of it is."""
    if is_adapter(module):
        return any(parameter.requires_grad for parameter in module.lora_A.parameters())  # type: ignore[union-attr]
    return isinstance(module, nn.Linear) and module.weight.requires_grad


def _exact_bytes(site: Site, counted: set[int]) -> int:
    """What the layer would keep without VeLoRA. Of targets that would keep one tensor, the first counts it; what exact
    savings make an input again from counts where nothing else keeps that."""
    new = [source for source in site.sources if source.storage.cdata not in counted]
    counted.update(source.storage.cdata for source in new)
    return site.mask_bytes + sum(source.nbytes for source in new if not (site.remade and source.held))


_SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"))


def checkpointed_block(model: nn.Module, name: str) -> str | None:
    """The block of transformers around ``name`` that is checkpointed, by its name; None where there is none."""
    found, path, module = None, "", model
    for part in name.split("."):
        # A model carries the flag too, and means its blocks.
        is_block = any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)
        if is_block and getattr(module, "gradient_checkpointing", False):
            found = path
        inner = getattr(module, part, None)
        if not isinstance(inner, nn.Module):  # a site's name goes on with its weight's
            return found
        module, path = inner, f"{path}.{part}".lstrip(".")
    return found
