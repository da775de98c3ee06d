"""A probe: how good the approximate weight gradients are on one batch, and what is really saved. It changes nothing.

For the exact dW = dY^T X and its approximation C v^T the inner product is |C|^2 = sum over the sub-tokens, and
|C v^T|^2 = sum_j |C_j|^2 |v_j|^2, so that the cosine of the two needs C and the norm of dW alone:

    cosine = |C|^2 / (|dW| |C v^T|)       (without a padded tail |C| / |dW|: what share of dW lies in v's direction)
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from leantune.activations.saved_bytes import SavedBytes
from leantune.activations.velora.projection import group_norms, kept_energy
from leantune.activations.velora.site import Site
from leantune.errors import InvalidArgumentError

Loss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> scalar loss."""


@dataclass(frozen=True)
class SiteProbe:
    """What a probe found at one site; None where its layer did not run or its loss did not reach it."""

    name: str
    kept_energy: float | None
    cosine: float | None


@dataclass(frozen=True)
class ProbeReport:
    """Every site, and the bytes that autograd keeps for the whole model between forward and backward, counted with
    plain layers (``exact_bytes``) and with VeLoRA (``kept_bytes``)."""

    rows: list[SiteProbe]
    exact_bytes: int
    kept_bytes: int

    @property
    def saved_bytes(self) -> int:
        """Bytes really saved, whatever else keeps an input or checkpoints a block; may be negative."""
        return self.exact_bytes - self.kept_bytes

    def __str__(self) -> str:
        lines = [
            f"VeLoRA probe: {self.exact_bytes:,} bytes kept by plain layers, {self.kept_bytes:,} with VeLoRA "
            f"({self.saved_bytes:,} saved)"
        ]
        for row in self.rows:
            energy, cosine = (("-" if x is None else f"{x:.3f}") for x in (row.kept_energy, row.cosine))
            lines.append(f"  {row.name}: kept energy {energy}, cosine of the weight gradient {cosine}")
        return "\n".join(lines)


class Probe:
    """What one site gathers over the calls of one probe, each exact and followed by a tap."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.tap = torch.zeros((), device=site.weight.device, requires_grad=True)
        self.v: Tensor | None = site.v
        self.energy: Tensor | None = None
        self.coefficients: Tensor | None = None
        self.exact: Tensor | None = None
        self.found: SiteProbe | None = None
        self._open = 0  # calls whose gradient has not come yet

    def run(self, site: Site, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The exact layer."""
        y = site.product.plain(x, weight, bias)
        if torch.is_grad_enabled():
            self._open += torch._C._current_graph_task_id() == -1  # not a recomputation's
            y = _Tap.apply(y, x.detach().to(y.dtype), self.tap, self)
        return y

    @torch.no_grad()
    def add(self, grad: Tensor, x: Tensor) -> None:
        """One call's part of both gradients."""
        site = self.site
        if self.v is None:
            self.v = site.direction(x, shared=False)  # this batch's own, for the length of the probe
        if self.v is None:
            return
        z = site.product.project(x, self.v.to(x.device))
        self.energy = kept_energy(x, z) if self.energy is None else self.energy
        coefficients, exact = site.product.coefficients(grad, z), site.product.exact_weight_gradient(grad, x)
        self.coefficients = coefficients if self.coefficients is None else self.coefficients.add_(coefficients)
        self.exact = exact if self.exact is None else self.exact.add_(exact)
        self._open -= 1
        if self._open == 0:  # so that one layer's exact gradient lives at a time
            self.found = self._compare()

    def finish(self) -> SiteProbe:
        """What was found."""
        return self._compare() if self.found is None else self.found

    def _compare(self) -> SiteProbe:
        energy = None if self.energy is None else float(self.energy)
        if self.v is None or self.coefficients is None or self.exact is None:
            return SiteProbe(self.site.name, energy, None)
        norms = self.site.product.per_group(group_norms(self.v, self.site.product.cut).to(self.coefficients))
        found = torch.linalg.vector_norm(self.coefficients).double()
        approximate = torch.linalg.vector_norm(self.coefficients * norms).double()
        exact = torch.linalg.vector_norm(self.exact).double()
        self.coefficients = self.exact = None
        if float(approximate) == 0 or float(exact) == 0:
            return SiteProbe(self.site.name, energy, None)
        return SiteProbe(self.site.name, energy, float(found.square() / approximate / exact))


class _Tap(torch.autograd.Function):
    """Passes a layer's output on, and its gradient back; shows the gradient to a probe on the way."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, tap: Tensor, probe: Probe) -> Tensor:
        ctx.save_for_backward(x)
        ctx.probe = probe
        return y.clone()  # recurrent cells write into what they get

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.probe.add(grad, x)
        return grad, None, grad.new_zeros((), dtype=ctx.probe.tap.dtype), None


def probe_sites(sites: list[Site], model: nn.Module, batch: Any, loss: Loss) -> ProbeReport:
    """See `VeloraHandle.probe`."""
    if not model.training:
        raise InvalidArgumentError(
            "the model is in evaluation mode, and a probe looks at a training step: call model.train() first."
        )
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.enable_grad():
            exact_bytes = _kept(sites, model, batch, loss, "plain")
            kept_bytes = _kept(sites, model, batch, loss, "projected")
            with _put_in(sites) as probes, _same_random_numbers(model):
                value = loss(model, batch)
                # For the taps alone: no parameter gets a gradient, and no hook of one runs.
                torch.autograd.grad(value, [probe.tap for probe in probes], allow_unused=True)
                with torch.no_grad():
                    rows = [probe.finish() for probe in probes]
    finally:
        for buffer, before in buffers:  # of batch normalisation
            buffer.copy_(before)
    return ProbeReport(rows, exact_bytes, kept_bytes)


def _same_random_numbers(model: nn.Module) -> AbstractContextManager[None]:
    """Every forward of a probe drops out what the next step would have, and the random state stays as it is."""
    device = next(iter(model.parameters())).device
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


@contextmanager
def _put_in(sites: list[Site]) -> Iterator[list[Probe]]:
    probes = [Probe(site) for site in sites]
    try:
        for site, probe in zip(sites, probes):
            site.probe = probe
        yield probes
    finally:
        for site in sites:
            site.probe = None


def _kept(sites: list[Site], model: nn.Module, batch: Any, loss: Loss, rehearses: str) -> int:
    """Bytes kept by a forward with plain layers, or with projections that leave no trace of this batch."""
    frozen = [site.weight for site in sites if site.factor is not None] if rehearses == "plain" else []
    try:
        for site in sites:
            site.rehearses = rehearses
        for weight in frozen:
            weight.requires_grad_(True)  # the layer to compare with trains its weight
        with SavedBytes(model) as saved, _same_random_numbers(model):
            loss(model, batch)
        return saved.bytes
    finally:
        for site in sites:
            site.rehearses = None
        for weight in frozen:
            weight.requires_grad_(False)
