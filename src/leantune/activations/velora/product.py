"""The product of an input and a weight whose weight gradient needs Z alone; one autograd function for all layer kinds.

What differs from kind to kind is a `Product`: how it multiplies, how its features lie in its input and in its weight.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from leantune.activations.velora.direction import FeatureSums
from leantune.activations.velora.projection import SubTokens


class Product(Protocol):
    """One product Y = X * W of a layer. Shapes are the layer's own; every method works under ``no_grad``.

    ``z`` is the projection of ``x``; ``coefficients`` C are what dW is without its outer product by v.
    """

    cut: SubTokens

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Y by torch's own differentiable operators: what the layer does without VeLoRA."""

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Y, the bits of `plain`. All operands are of one dtype."""

    def input_gradient(self, grad: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        """dX of ``shape`` from dY, exact."""

    def bias_gradient(self, grad: Tensor) -> Tensor:
        """db from dY, exact."""

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        """Z in x's dtype, without a temporary of X's size."""

    def coefficients(self, grad: Tensor, z: Tensor) -> Tensor:
        """C from dY and Z, at least fp32. Its dimensions are the weight's, groups in place of features."""

    def weight_gradient(self, coefficients: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
        """dW of ``dtype`` from C and v, in the weight's shape."""

    def exact_weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """dW from dY and X, exact, at least fp32, for `leantune.activations.velora.probe`."""

    def feature_sums(self, x: Tensor) -> FeatureSums:
        """The sum of all tokens."""

    def group_shape(self, weight: Tensor) -> tuple[int, ...]:
        """Shape of C."""

    def per_group(self, values: Tensor) -> Tensor:
        """``values`` (groups,) in a shape that broadcasts against C."""


class Projected(torch.autograd.Function):
    """Saves Z, W and v; never X. Two backwards over one forward are equal: nothing saved is changed.

    Arguments: x; the weight; the bias or None; the parameter that takes C as its gradient where the weight is frozen
    (`leantune.activations.velora.factored`) or None; that C's factor for each group or None; Z; v; the product; the
    dtype of autocast or None. The weight is saved as it is, and cast again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        factor: Tensor | None,
        norms: Tensor | None,
        z: Tensor,
        v: Tensor,
        product: Product,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.save_for_backward(z, weight, v, norms)
        ctx.product, ctx.dtype, ctx.shape = product, dtype, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        if dtype is not None:
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        return product.multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, weight, v, norms = ctx.saved_tensors
        product, needs = ctx.product, ctx.needs_input_grad
        dx = dw = db = dc = None
        if needs[0]:
            dx = product.input_gradient(grad, weight if ctx.dtype is None else weight.to(ctx.dtype), ctx.shape)
        if needs[1] or needs[3]:
            coefficients = product.coefficients(grad, z)
            if needs[1]:
                dw = product.weight_gradient(coefficients, v, weight.dtype)
            if needs[3]:
                dc = coefficients.mul_(product.per_group(norms))
        if needs[2]:
            db = product.bias_gradient(grad).to(ctx.bias_dtype)
        return dx, dw, db, dc, None, None, None, None, None
