"""Factored training: gradient and optimizer state of a projected weight as C, M times smaller than the weight.

With v fixed, dW[o, j M + s] = C[o, j] v[s] has out * g degrees of freedom, and so have Adam's moments: m = m_C v and
w = w_C v^2. The weight is frozen, and a proxy parameter P of C's shape takes the gradient

    c[o, j] = C[o, j] |v_j|        v_j: v as group j sees it, without padding (|v_j| = 1 but for a padded tail)

so |c| = |dW|: norms and clipping are those of the whole gradient. P is zero between steps. The optimizer moves it by
delta, which is then folded into the weight, and P is zero again:

    W[o, jM + s] = (1 - lr wd) W[o, jM + s] + delta[o, j] sign(u[s])     for rules that do not feel a gradient's scale
    W[o, jM + s] = (1 - lr wd) W[o, jM + s] + delta[o, j] u[s]           for rules that are linear in it (SGD, Lomo)

with u = v_j / |v_j|. The first is Adam on dW itself, whose step mhat_c u[s] / (|u[s]| sqrt(vhat_c) + eps) is
sign(u[s]) mhat_c / (sqrt(vhat_c) + eps / |u[s]|). The proxy's own step has eps in place of eps / |u[s]|, hence equals
Adam on dW whose eps is eps |u[s]| for feature s: the two differ where a gradient is not large against eps.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from leantune.activations.velora.projection import group_norms
from leantune.activations.velora.site import Site
from leantune.codec.counter_hash import stream_key
from leantune.codec.tiles import Tile
from leantune.errors import BackwardError, InvalidArgumentError, InvalidTypeError
from leantune.optim.row_shard import RowShard, is_sharded
from leantune.optim.weights import WeightMatrix

PROXY = "velora_"
"""What the proxy's name has in front of the weight's."""
_KEY_SPACE = 1 << 32
"""Positions of proxies' weights among the random streams, apart from the optimizer's own parameters'."""


class Factor:
    """One site's proxy.

    Args:
        site: its weight is frozen and the proxy, fp32 (fp64 for fp64 weights) and zero, is registered beside it.
        position: of the site among all, part of the key of its random bits.
    """

    def __init__(self, site: Site, position: int) -> None:
        self.site, self.position = site, position
        self.name = PROXY + site.weight_name
        self.folds = 0
        self.optimizer: Any = None
        self._norms: tuple[Tensor, Tensor] | None = None  # (v, the norms of its groups)
        weight = site.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        proxy = torch.zeros(site.product.group_shape(weight), dtype=wide, device=weight.device)
        weight.requires_grad_(False)
        site.module.register_parameter(self.name, nn.Parameter(proxy))
        self._seen = self.proxy._version
        self._handles = [
            site.module.register_state_dict_post_hook(partial(_leave_out, self.name)),
            site.module.register_load_state_dict_post_hook(partial(_forgive_missing, self.name)),
        ]

    @property
    def proxy(self) -> nn.Parameter:
        """P."""
        proxy: nn.Parameter = getattr(self.site.module, self.name)
        return proxy

    def of(self, site: Site, v: Tensor) -> tuple[Tensor, Tensor]:
        """(P, the factor of each group of C in its gradient), for a forward that trains."""
        if self._norms is None or self._norms[0] is not v:
            self._norms = v, self._measure(v)
        return self.proxy, self._norms[1]

    def fold(self, group: dict[str, Any], response: str) -> None:
        """Put what the optimizer did to P into the weight; nothing where it did nothing.

        Temporaries: 8 MiB. Weights under 32 bits are rounded stochastically, unless the group says ``rounding`` is
        "nearest".
        """
        proxy, v = self.proxy, self.site.v
        if proxy._version == self._seen:
            return
        self.folds += 1
        decay = 1 - float(group["lr"]) * float(group.get("weight_decay", 0.0))
        delta = proxy.detach()
        if v is None:  # no batch had a direction, so C was zero
            v = torch.zeros(self.site.product.cut.size, device=proxy.device)
        if response == "linear":
            norms = group_norms(v, self.site.product.cut).to(delta)
            delta = delta / self.site.product.per_group(norms.clamp(min=torch.finfo(delta.dtype).tiny))
        else:
            v = v.sign()
        weight = self.site.weight.detach()
        matrix = weight.view(weight.shape[0], -1)
        writer = self._writer(matrix, group)
        for top, rows in self.site.product.gradient_strips(delta, v):
            strip = Tile(top, top + rows.shape[0], 0, matrix.shape[1])
            if writer is None:
                strip.of(matrix).mul_(decay).add_(rows)
            else:
                writer.write(strip, writer.read(strip).mul_(decay).add_(rows))
        proxy.detach().zero_()
        self._seen = proxy._version

    def remove(self) -> None:
        """Take the proxy away and train the weight again."""
        for handle in self._handles:
            handle.remove()
        delattr(self.site.module, self.name)
        self.site.weight.requires_grad_(True)

    def _writer(self, matrix: Tensor, group: dict[str, Any]) -> WeightMatrix | None:
        if matrix.dtype in (torch.float32, torch.float64):
            return None
        key = stream_key(int(group.get("seed", 0)), self.folds, _KEY_SPACE + self.position)
        shard = RowShard(matrix, 0, matrix.shape[0], tuple(matrix.shape))
        return WeightMatrix(shard, group.get("rounding"), None, key)

    @torch.compiler.disable
    def _measure(self, v: Tensor) -> Tensor:
        return group_norms(v, self.site.product.cut).to(self.proxy)

    def check_ready(self) -> None:
        """Raise BackwardError before a training forward whose step would not reach the weight."""
        if self.optimizer is None or self.optimizer() is None:
            raise BackwardError(
                f"{self.site.name} trains factored, but no optimizer is attached: its steps would never reach the "
                "weight. Call handle.attach(optimizer) with the optimizer that has the model's parameters."
            )
        if self.proxy._version != self._seen:
            raise BackwardError(
                f"the proxy of {self.site.name} was moved without its optimizer's step() having been called since: "
                "call optimizer.step() after each backward."
            )


def _leave_out(name: str, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state.pop(prefix + name, None)


def _forgive_missing(name: str, module: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [key for key in keys.missing_keys if key.rpartition(".")[2] != name]


def check_factorable(site: Site, refresh_every: int | None) -> None:
    """Raise InvalidArgumentError or InvalidTypeError where a site cannot train factored."""
    weight = site.weight
    if refresh_every is not None:
        raise InvalidArgumentError(
            "factored=True needs a direction that stays: the optimizer's state is of the first one. Leave "
            "refresh_every out."
        )
    if is_sharded(weight):
        raise InvalidTypeError(
            f"the weight of {site.name} is a DTensor; factored training is for weights that are whole on each process. "
            "Leave factored out, or train replicas."
        )
    if not weight.is_contiguous():
        raise InvalidTypeError(
            f"the weight of {site.name} is not contiguous (stride {weight.stride()}); write "
            "weight.data = weight.data.contiguous() first, or leave factored out."
        )


def attach_optimizer(factors: list[Factor], optimizer: Optimizer) -> Callable[[], None]:
    """Fold the proxies that ``optimizer`` has after each of its steps; returns what ends that.

    Raises InvalidTypeError for a rule whose step on C is not known to give its step on dW, InvalidArgumentError where
    the optimizer has none of the proxies, or a weight decay that is not decoupled.
    """
    response = _response(optimizer)
    groups = {param: group for group in optimizer.param_groups for param in group["params"]}
    mine = [factor for factor in factors if factor.proxy in groups]
    if not mine:
        raise InvalidArgumentError(
            "this optimizer has none of the parameters that apply_velora(factored=True) made. Build the optimizer from "
            "model.parameters() after apply_velora."
        )
    for factor in mine:
        _check_decay(optimizer, groups[factor.proxy])
    for factor in mine:
        factor.optimizer = weakref.ref(optimizer)

    def fold(stepped: Optimizer, args: Any, kwargs: Any) -> None:
        current = {param: group for group in stepped.param_groups for param in group["params"]}
        with torch.no_grad():
            for factor in mine:
                factor.fold(current[factor.proxy], response)

    return optimizer.register_step_post_hook(fold).remove


def _response(optimizer: Optimizer) -> str:
    """How a rule's step follows a gradient's scale: "normalised" (not at all, element by element) or "linear"."""
    own: str | None = getattr(optimizer, "gradient_response", None)
    if own is None and type(optimizer) in (torch.optim.AdamW, torch.optim.Adam):
        own = "normalised"
    if own is None and type(optimizer) is torch.optim.SGD:
        own = "linear"
    if own is None:
        raise InvalidTypeError(
            f"factored training does not know what {type(optimizer).__name__}'s step on the small gradient means for "
            "the weight. Use TernaryAdamW, AdamW or Lomo of leantune, or torch's AdamW, Adam or SGD."
        )
    return own


def _check_decay(optimizer: Optimizer, group: dict[str, Any]) -> None:
    coupled = type(optimizer) is torch.optim.SGD or (
        type(optimizer) is torch.optim.Adam and not group.get("decoupled_weight_decay", False)
    )
    if coupled and group.get("weight_decay", 0.0):
        raise InvalidArgumentError(
            f"{type(optimizer).__name__} adds weight_decay to the gradient, which the small gradient cannot hold. Use "
            "AdamW, whose decay is decoupled, or weight_decay=0."
        )
