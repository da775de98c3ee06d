"""What `apply_velora` gives back: the layers it changed, their directions, their report, and the way back."""

from pathlib import Path

import torch
from torch import Tensor, nn

from leantune.activations.velora.layer import Layer
from leantune.activations.velora.report import VeloraReport, VeloraRow
from leantune.activations.velora.site import Site
from leantune.errors import StateMismatchError
from leantune.kernels.half_linear import needs_fp32_products

_COUNT = ".forwards"


class VeloraHandle:
    """The layers that :func:`leantune.apply_velora` changed."""

    def __init__(self, model: nn.Module, layers: list[Layer]) -> None:
        self._layers = layers
        linear = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
        self._trained = {name for name, module in linear if module.weight.requires_grad}

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
        """Bytes of the last training forward and kept energy of the batch that set v, site by site."""
        rows: list[VeloraRow] = []
        counted: set[int] = set()
        for site in self.sites:
            energy = None if site.energy is None else float(site.energy)
            cut = site.product.cut
            # Targets that read one tensor would have kept it once: the first of them counts it.
            again = site.source is not None and site.source.cdata in counted
            if site.source is not None:
                counted.add(site.source.cdata)
            exact = 0 if again else site.exact_bytes
            sizes = (cut.features, cut.size, cut.groups, site.tokens, exact, site.kept_bytes)
            rows.append(VeloraRow(site.name, *sizes, energy, self._input_kept_anyway(site)))
        return VeloraReport(rows)

    def use_fp32_products(self) -> None:
        """Multiply narrow operands in fp32, as :mod:`leantune.kernels.half_linear` does for plain layers on such
        CPUs."""
        for site in self.sites:
            if hasattr(site.product, "wide"):
                cpu = site.weight.device.type == "cpu"
                site.product.wide = cpu and needs_fp32_products(site.weight.dtype)

    def remove(self) -> None:
        """Restore every layer exactly as it was.

        Raises StateMismatchError, nothing changed, where something else has replaced a layer's forward since.
        """
        for layer in self._layers:
            layer.check_on_top()
        for layer in self._layers:
            layer.leave()
        self._layers = []

    def state_dict(self) -> dict[str, Tensor]:
        """What a run needs to go on: of every site that has one its direction, fp32 (sub-token size,), by its name (no
        entry: not set yet); and where directions are refreshed, the forwards counted so far."""
        state = {site.name: site.v.clone() for site in self.sites if site.v is not None}
        counted = (site for site in self.sites if site.refresh_every is not None)
        return state | {site.name + _COUNT: torch.tensor(site.forwards) for site in counted}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore `state_dict`; raises StateMismatchError, nothing changed, where a name or size does not fit."""
        by_name = {site.name: site for site in self.sites}
        shapes: dict[str, tuple[int, ...]] = {site.name: (site.product.cut.size,) for site in self.sites}
        shapes |= {site.name + _COUNT: () for site in self.sites if site.refresh_every is not None}
        for name, value in state.items():
            if tuple(value.shape) != shapes.get(name, (-1,)):
                raise StateMismatchError(
                    f"saved VeLoRA state {name} has shape {tuple(value.shape)}, here: {shapes.get(name, 'none such')}. "
                    "Apply VeLoRA with the target_modules, num_groups and refresh_every it was saved with."
                )
        for name, site in by_name.items():
            site.v = state[name].to(site.weight.device, torch.float32) if name in state else None
            site.forwards = int(state.get(name + _COUNT, 0))

    def save(self, path: str | Path) -> None:
        """Write `state_dict` to a safetensors file."""
        from safetensors.torch import save_file

        save_file(self.state_dict(), str(path))

    def load(self, path: str | Path) -> None:
        """Read what :meth:`save` wrote."""
        from safetensors.torch import load_file

        self.load_state_dict(load_file(str(path)))

    def _input_kept_anyway(self, site: Site) -> bool:
        """Whether the input is kept whatever VeLoRA does: something still held it when backward came (a ReLU keeps its
        output), the block is checkpointed, or a trained sibling outside the targets, by the usual names, reads it."""
        if site.held or site.recomputed:
            return True
        parent, _, own = site.name.rpartition(".")
        siblings = next((family for family in _SHARED_INPUTS if own in family), ())
        names = {f"{parent}.{name}".lstrip(".") for name in siblings if name != own}
        return bool((names - set(self.names)) & self._trained)


_SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"))
