"""Y = X W^T + b that keeps Z instead of X for backward: forward and dX exact, dW approximate."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from leantune.activations.velora.projection import SubTokens, project, weight_gradient
from leantune.kernels.half_linear import input_gradient, linear_product


class VeloraLinear(torch.autograd.Function):
    """Saves Z (N, groups), W and v; never X. Two backwards over one forward are equal: nothing saved is changed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, v: Tensor, cut: SubTokens, wide: bool
    ) -> Tensor:
        """``x`` (..., D), ``z`` its projection (N, groups). ``wide``: fp32 products of narrow operands, for such
        CPUs."""
        ctx.save_for_backward(z, weight, v)
        ctx.cut, ctx.wide = cut, wide
        if wide:
            return linear_product(x.reshape(-1, cut.features), weight, bias).view(*x.shape[:-1], weight.shape[0])
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        z, weight, v = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        flat = grad_output.reshape(-1, grad_output.shape[-1])
        grad_x = None
        if needs_x:
            grad_x = (
                input_gradient(flat, weight).view(*grad_output.shape[:-1], -1) if ctx.wide else grad_output @ weight
            )
        grad_weight = weight_gradient(flat, z, v, ctx.cut) if needs_weight else None
        grad_bias = flat.sum(dim=0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None, None


def velora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, v: Tensor, cut: SubTokens, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """(Y, Z). Under autocast the inputs are cast as ``functional.linear`` would cast them."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        with torch.autocast(device, enabled=False):
            return _apply(x, weight, bias, v, cut, wide)
    return _apply(x, weight, bias, v, cut, wide)


def _apply(
    x: Tensor, weight: Tensor, bias: Tensor | None, v: Tensor, cut: SubTokens, wide: bool
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        z = project(x.detach().reshape(-1, cut.features), v, cut)
    return VeloraLinear.apply(x, weight, bias, z, v, cut, wide and x.dtype == weight.dtype != torch.float32), z
