"""Linear layers: ``nn.Linear``, and transformers' ``Conv1D``, whose weight is stored transposed (GPT-2)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from leantune.activations.velora.direction import FeatureSums
from leantune.activations.velora.kind import own_type, refuse_frozen
from leantune.activations.velora.layer import Layer
from leantune.activations.velora.projection import SubTokens, outer_product, project
from leantune.activations.velora.site import Site
from leantune.kernels.half_linear import half_linear, input_gradient, linear_product

_CAST_ELEMENTS = 1 << 21


@dataclass(eq=False)
class LinearProduct:
    """Y = X W^T + b for X (..., D): W is (out, D), or (D, out) where ``transposed``.

    ``wide``: 16-bit operands are multiplied in fp32, for CPUs without 16-bit products.
    """

    cut: SubTokens
    transposed: bool = False
    wide: bool = False

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._widens(x, weight):
            return half_linear(x, self._rows(weight), bias)
        return functional.linear(x, self._rows(weight), bias)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = self._rows(weight)
        if self._widens(x, weight):
            return linear_product(self._flat(x), rows, bias).view(*x.shape[:-1], rows.shape[0])
        return functional.linear(x, rows, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        rows = self._rows(weight)
        if self._widens(grad, weight):
            return input_gradient(grad.reshape(-1, grad.shape[-1]), rows).view(shape)
        return grad @ rows

    def bias_gradient(self, grad: Tensor) -> Tensor:
        return grad.reshape(-1, grad.shape[-1]).sum(dim=0)

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        return project(self._flat(x), v, self.cut)

    def coefficients(self, grad: Tensor, z: Tensor) -> Tensor:
        flat = grad.reshape(-1, grad.shape[-1])
        return wide_product(z, flat) if self.transposed else wide_product(flat, z)

    def weight_gradient(self, coefficients: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
        # Transposed: the features come first; the one row is the whole matrix.
        if self.transposed:
            return outer_product(coefficients[None], v, self.cut, dtype)[0]
        return outer_product(coefficients, v, self.cut, dtype)

    def exact_weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        flat = grad.reshape(-1, grad.shape[-1])
        return wide_product(self._flat(x), flat) if self.transposed else wide_product(flat, self._flat(x))

    def feature_sums(self, x: Tensor) -> FeatureSums:
        return FeatureSums.of(self._flat(x))

    def group_shape(self, weight: Tensor) -> tuple[int, ...]:
        outputs = self._rows(weight).shape[0]
        return (self.cut.groups, outputs) if self.transposed else (outputs, self.cut.groups)

    def per_group(self, values: Tensor) -> Tensor:
        return values[:, None] if self.transposed else values

    def _rows(self, weight: Tensor) -> Tensor:
        return weight.t() if self.transposed else weight

    def _flat(self, x: Tensor) -> Tensor:
        return x.reshape(-1, self.cut.features)

    def _widens(self, x: Tensor, weight: Tensor) -> bool:
        return self.wide and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """left^T right, at least fp32, (n, m) from (N, n) and (N, m): 16-bit operands are summed and given in fp32.

    On a CPU some rows are widened at a time (8 MiB); on a GPU the product itself gives fp32.
    """
    wide = torch.promote_types(torch.promote_types(left.dtype, right.dtype), torch.float32)
    if left.dtype == right.dtype == wide:
        return left.t() @ right
    if left.device.type == "cuda" and left.dtype == right.dtype:
        return torch.mm(left.t(), right, out_dtype=torch.float32)
    if torch.compiler.is_compiling():
        return left.t().to(wide) @ right.to(wide)
    total = left.new_zeros((left.shape[1], right.shape[1]), dtype=wide)
    rows = max(1, _CAST_ELEMENTS // max(1, left.shape[1] + right.shape[1]))
    for some, others in zip(left.split(rows), right.split(rows)):
        total.addmm_(some.t().to(wide), others.to(wide))
    return total


class LinearKind:
    """``nn.Linear`` in full fine-tuning."""

    label = "nn.Linear"

    def takes(self, module: nn.Module) -> bool:
        return own_type(module) is nn.Linear

    def sites(self, name: str, module: Any, num_groups: int) -> list[Site]:
        refuse_frozen(name, module, "weight")
        return [Site(name, module, LinearProduct(SubTokens.of(module.in_features, num_groups)))]

    def forward(self, layer: Layer, input: Tensor) -> Tensor:
        return layer.sites[0](input)


class TransposedLinearKind:
    """transformers' ``Conv1D``: a linear layer with a weight of (in, out)."""

    label = "transformers' Conv1D"

    def takes(self, module: nn.Module) -> bool:
        kind = own_type(module)
        return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"

    def sites(self, name: str, module: Any, num_groups: int) -> list[Site]:
        refuse_frozen(name, module, "weight")
        cut = SubTokens.of(module.weight.shape[0], num_groups)
        return [Site(name, module, LinearProduct(cut, transposed=True))]

    def forward(self, layer: Layer, x: Tensor) -> Tensor:
        return layer.sites[0](x)
