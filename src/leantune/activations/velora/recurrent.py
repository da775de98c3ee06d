"""Recurrent cells: ``nn.LSTMCell`` and ``nn.GRUCell``. Both their inputs, x and h, are projected; the gates are exact.

Backpropagation through T time steps keeps x and h of each step for the gradients of the input and hidden weights: that
is what becomes Z. The gates' own activations are kept as torch's cell keeps them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from leantune.activations.velora.kind import own_type, refuse_frozen
from leantune.activations.velora.layer import Layer
from leantune.activations.velora.linear import LinearProduct
from leantune.activations.velora.projection import SubTokens
from leantune.activations.velora.site import Site


class RecurrentKind:
    """What both cells share: two sites, ``NAME.weight_ih`` of x and ``NAME.weight_hh`` of h, each with its own v.

    A layer's first training forward that has a direction sets it: a time step whose h is zero has none.
    """

    label = "nn.LSTMCell, nn.GRUCell"

    def takes(self, module: nn.Module) -> bool:
        return own_type(module) in (nn.LSTMCell, nn.GRUCell)

    def sites(self, name: str, module: Any, num_groups: int) -> list[Site]:
        refuse_frozen(name, module, "weight_ih", "weight_hh")
        sizes = {"ih": module.input_size, "hh": module.hidden_size}
        return [
            Site(
                f"{name}.weight_{part}",
                module,
                LinearProduct(SubTokens.of(size, num_groups)),
                weight=f"weight_{part}",
                bias=f"bias_{part}",
            )
            for part, size in sizes.items()
        ]

    def forward(self, layer: Layer, input: Tensor, hx: Any = None) -> Any:
        lstm = own_type(layer.module) is nn.LSTMCell
        if input.dim() not in (1, 2):
            raise ValueError(
                f"{own_type(layer.module).__name__}: input is {input.dim()}-D; it takes 1-D or 2-D tensors"
            )
        batched = input.dim() == 2
        x = input if batched else input[None]
        states = (None, None) if hx is None else (hx if lstm else (hx, None))
        h, c = (_state(state, x, layer, batched) for state in states)
        from_x, from_h = layer.sites[0](x), layer.sites[1](h)
        if not lstm:
            new = _gru(from_x, from_h, h)
            return new if batched else new[0]
        h, c = _lstm(from_x, from_h, c)
        return (h, c) if batched else (h[0], c[0])


def _state(state: Tensor | None, x: Tensor, layer: Layer, batched: bool) -> Tensor:
    if state is None:
        return x.new_zeros((x.shape[0], layer.sites[1].product.cut.features))
    if state.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        state = state.to(torch.get_autocast_dtype("cuda"))  # as torch's cell does, there alone
    return state if batched else state[None]


def _lstm(from_x: Tensor, from_h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """(h, c) of the next step, operation for operation what torch's cell does, in the memory of ``from_h``."""
    take, forget, new, give = from_h.add_(from_x).unsafe_chunk(4, dim=1)
    take, forget, new, give = take.sigmoid_(), forget.sigmoid_(), new.tanh_(), give.sigmoid_()
    c = (forget * c).add_(take * new)
    return give * c.tanh(), c


def _gru(from_x: Tensor, from_h: Tensor, h: Tensor) -> Tensor:
    """h of the next step, operation for operation what torch's cell does, in the memory of ``from_h``."""
    x_reset, x_update, x_new = from_x.unsafe_chunk(3, dim=1)
    h_reset, h_update, h_new = from_h.unsafe_chunk(3, dim=1)
    reset, update = h_reset.add_(x_reset).sigmoid_(), h_update.add_(x_update).sigmoid_()
    new = x_new.add(h_new.mul_(reset)).tanh_()
    return (h - new).mul_(update).add_(new)
