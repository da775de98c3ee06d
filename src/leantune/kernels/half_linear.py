"""Linear layers with bf16 (or fp16) weights on a CPU that cannot multiply in bf16: products in fp32, a tile at a time.

Without AVX-512 or AMX torch falls back to loops for bf16 matrix products; the gradient of a layer's input runs 100
times slower than in fp32. Here a tile of the weight's rows is widened into one fp32 buffer, multiplied, and the result
rounded once: weights, activations and gradients stay bf16; what is added is the buffer (8 MiB at most) and the fp32
form of one layer's input or output. Forward saves the input and the weight, exactly as ``nn.Linear`` does.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

TILE_BYTES = 8 << 20
"""Size of the fp32 buffer that a tile of the weight is widened into."""


def needs_fp32_products(dtype: torch.dtype) -> bool:
    """Whether this CPU lacks fast matrix products of ``dtype`` (bf16 or fp16)."""
    if dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return False


class HalfLinear(torch.autograd.Function):
    """Y = X W^T + b for X (tokens, in), W (out, in) of 16 bits; every product in fp32, every result rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return linear_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wide = grads[0].float()
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = input_gradient(wide, weight).to(x.dtype)
        if ctx.needs_input_grad[1]:
            wide_x = x.float()
            dw = torch.empty_like(weight)
            for rows in _row_tiles(weight):
                dw[rows] = wide[:, rows].t() @ wide_x
        if ctx.needs_input_grad[2]:
            db = wide.sum(0).to(ctx.bias_dtype)
        return dx, dw, db


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """X W^T + b in fp32 products, rounded once to x's dtype, for x (tokens, in) and weight (out, in)."""
    wide = x.float()
    out = x.new_empty((x.shape[0], weight.shape[0]))
    for rows, tile in _wide_rows(weight):
        product = wide @ tile.t()
        if bias is not None:
            product += bias[rows]
        out[:, rows] = product
    return out


def input_gradient(grad_output: Tensor, weight: Tensor) -> Tensor:
    """dY W in fp32 products, rounded once to dY's dtype, for dY (tokens, out)."""
    wide = grad_output.float()
    total = torch.zeros((wide.shape[0], weight.shape[1]), dtype=torch.float32, device=wide.device)
    for rows, tile in _wide_rows(weight):
        total.addmm_(wide[:, rows], tile)
    return total.to(grad_output.dtype)


def half_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` for 16-bit x (..., in) and weight (out, in), with fp32 products."""
    out: Tensor = HalfLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    return out.view(*x.shape[:-1], weight.shape[0])


class Fp32Products:
    """Handle of `use_fp32_products`: the layers changed, and the way back."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.layers = layers

    def remove(self) -> None:
        """Give every layer its own forward back."""
        for layer in self.layers:
            layer.__dict__.pop("forward", None)
        self.layers = []


def use_fp32_products(model: nn.Module) -> Fp32Products:
    """Let every plain ``nn.Linear`` with 16-bit weights on the CPU multiply in fp32, where this CPU needs it.

    Layers whose forward has been replaced already are left alone, and so is everything on another device.
    """
    changed = []
    for module in model.modules():
        if type(module) is not nn.Linear or "forward" in module.__dict__ or module.weight.device.type != "cpu":
            continue
        if needs_fp32_products(module.weight.dtype):
            module.forward = _forward_of(module)  # type: ignore[method-assign]
            changed.append(module)
    return Fp32Products(changed)


def _forward_of(layer: nn.Linear) -> Any:
    def forward(input: Tensor) -> Tensor:
        if input.dtype != layer.weight.dtype:
            return nn.functional.linear(input, layer.weight, layer.bias)
        return half_linear(input, layer.weight, layer.bias)

    return forward


def _row_tiles(weight: Tensor) -> Iterator[slice]:
    height = max(1, TILE_BYTES // (4 * weight.shape[1]))
    for top in range(0, weight.shape[0], height):
        yield slice(top, min(top + height, weight.shape[0]))


def _wide_rows(weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows, those rows of the weight in fp32), each in the same buffer: use one before taking the next."""
    buffer = None
    for rows in _row_tiles(weight):
        height = rows.stop - rows.start
        if buffer is None:
            buffer = torch.empty((height, weight.shape[1]), dtype=torch.float32, device=weight.device)
        tile = buffer[:height]
        tile.copy_(weight[rows])
        yield rows, tile
