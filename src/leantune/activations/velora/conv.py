"""Convolutions: ``nn.Conv1d`` and ``nn.Conv2d``. A token is one input position with its channels.

Patches are never made. Projecting channels commutes with whatever a convolution does to positions (stride, padding,
dilation), so with X (B, C, ...) kept as Z (B, g, ...), one number for each sub-token of M channels at each position,

    C = convolution's weight gradient of (Z, dY)   (out, g, kernel)       dW[o, j M + s, k] = C[o, j, k] v[s]

which is M times fewer FLOPs than dW itself. With convolution groups each group's channels are cut alike, and v is one
for all of them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leantune.activations.velora.direction import FeatureSums
from leantune.activations.velora.kind import own_type, refuse_frozen
from leantune.activations.velora.layer import Layer
from leantune.activations.velora.projection import SubTokens, outer_product, outer_strips, project
from leantune.activations.velora.site import Site
from leantune.errors import InvalidArgumentError, InvalidTypeError


@dataclass(eq=False)
class ConvProduct:
    """Y = X * W + b for X (B, channels, positions...) and W (out, channels / conv_groups, kernel...).

    ``cut`` is of the channels of one convolution group.
    """

    cut: SubTokens
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    conv_groups: int
    kernel: tuple[int, ...]

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolve = torch.nn.functional.conv1d if len(self.stride) == 1 else torch.nn.functional.conv2d
        y: Tensor = convolve(x, weight, bias, self.stride, self.padding, self.dilation, self.conv_groups)
        return y

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.plain(x, weight, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
        x = _shape_alone(grad, shape)
        if len(shape) == 4 and strides[1] == 1 and shape[1] > 1:
            # Its layout decides how the gradient is made, to the bit; what lies in it is never read.
            x = torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
        return self._backward(grad, x, weight, input_wanted=True)

    def bias_gradient(self, grad: Tensor) -> Tensor:
        return grad.sum(dim=(0, *range(2, grad.dim())))

    def project(self, x: Tensor, v: Tensor) -> Tensor:
        batch, _, *positions = x.shape
        groups = self.conv_groups * self.cut.groups
        if _channels_last(x):
            tokens = x.movedim(1, -1).reshape(-1, self.cut.features)
            return project(tokens, v, self.cut).view(batch, *positions, groups).movedim(-1, 1)
        # (one convolution group of one image, its channels, positions)
        planes = x.reshape(batch * self.conv_groups, self.cut.features, math.prod(positions))
        return _project_planes(planes, v.to(x.dtype), self.cut).view(batch, groups, *positions)

    def coefficients(self, grad: Tensor, z: Tensor) -> Tensor:
        wide = torch.promote_types(grad.dtype, torch.float32)
        if grad.device.type == "cpu":
            grad, z = grad.to(wide), z.to(wide)
        shape = torch.Size((grad.shape[1], self.cut.groups, *self.kernel))
        return self._backward(grad, z, _shape_alone(grad, shape), input_wanted=False).to(wide)

    def weight_gradient(self, coefficients: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
        return outer_product(coefficients, v, self.cut, dtype)

    def gradient_strips(self, coefficients: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor]]:
        return outer_strips(coefficients, v, self.cut, transposed=False)

    def exact_weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        wide = torch.promote_types(grad.dtype, torch.float32)
        grad, shape = grad.to(wide), torch.Size((grad.shape[1], self.cut.features, *self.kernel))
        return self._backward(grad, x.to(wide), _shape_alone(grad, shape), input_wanted=False)

    def feature_sums(self, x: Tensor) -> FeatureSums:
        return FeatureSums.of_planes(x.reshape(-1, self.cut.features, math.prod(x.shape[2:])))

    def group_shape(self, weight: Tensor) -> tuple[int, ...]:
        return (weight.shape[0], self.cut.groups, *weight.shape[2:])

    def per_group(self, values: Tensor) -> Tensor:
        return values.view(-1, *(1 for _ in self.stride))

    def _backward(self, grad: Tensor, x: Tensor, weight: Tensor, input_wanted: bool) -> Tensor:
        found = torch.ops.aten.convolution_backward(
            grad,
            x,
            weight,
            None,
            list(self.stride),
            list(self.padding),
            list(self.dilation),
            False,
            [0] * len(self.stride),
            self.conv_groups,
            [input_wanted, not input_wanted, False],
        )
        gradient: Tensor = found[0] if input_wanted else found[1]
        return gradient


def _shape_alone(like: Tensor, shape: torch.Size) -> Tensor:
    """A tensor without memory for an operator that looks at the shape alone."""
    return like.new_empty(1).expand(shape)


def _channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.shape[1] > 1 and x.is_contiguous(memory_format=torch.channels_last)


def _project_planes(planes: Tensor, v: Tensor, cut: SubTokens) -> Tensor:
    """(B, groups, positions) from (B, features, positions)."""
    count, _, positions = planes.shape
    full = cut.whole // cut.size
    if not cut.tail:
        whole = planes.reshape(count * full, cut.size, positions)
        return torch.bmm(v.expand(count * full, 1, cut.size), whole).view(count, full, positions)
    z = planes.new_empty((count, cut.groups, positions))
    for plane, into in zip(planes, z):  # one at a time: where a tail lies between them, they are no view of one batch
        if full:
            whole = plane[: cut.whole].unflatten(0, (full, cut.size))
            into[:full] = torch.bmm(v.expand(full, 1, cut.size), whole)[:, 0]
        into[full] = v[: cut.tail] @ plane[cut.whole :]
    return z


class ConvKind:
    """``nn.Conv1d`` and ``nn.Conv2d`` in full fine-tuning, padded with zeros."""

    label = "nn.Conv1d, nn.Conv2d"

    def takes(self, module: nn.Module) -> bool:
        return own_type(module) in (nn.Conv1d, nn.Conv2d)

    def sites(self, name: str, module: Any, num_groups: int) -> list[Site]:
        refuse_frozen(name, module, "weight")
        if module.padding_mode != "zeros":
            raise InvalidTypeError(
                f"{name} pads by {module.padding_mode!r}, which keeps or copies its input whatever VeLoRA does. Leave "
                "it out, or pad with zeros."
            )
        channels = module.in_channels // module.groups
        if channels == 1:
            raise InvalidArgumentError(
                f"{name} convolves each channel by itself (groups={module.groups}): a sub-token would be one number, "
                "so that VeLoRA has nothing to save. Leave it out."
            )
        if not isinstance(num_groups, int) or num_groups % module.groups:
            raise InvalidArgumentError(
                f"num_groups is {num_groups!r}, and {name} has groups={module.groups}, each of whose channels are cut "
                f"alike: write a multiple of {module.groups}."
            )
        cut = SubTokens.of(channels, num_groups // module.groups)
        size = (module.stride, _padding(name, module), module.dilation)
        return [Site(name, module, ConvProduct(cut, *size, module.groups, module.kernel_size))]

    def forward(self, layer: Layer, input: Tensor) -> Tensor:
        dimensions = len(layer.sites[0].weight.shape)
        if input.dim() == dimensions - 1:
            return layer.sites[0](input[None])[0]
        return layer.sites[0](input)


def _padding(name: str, module: Any) -> tuple[int, ...]:
    """Zeros on either side. Raises InvalidArgumentError for padding="same" with more on one side than on the other."""
    if not isinstance(module.padding, str):
        return tuple(module.padding)
    if module.padding == "valid":
        return (0,) * len(module.kernel_size)
    totals = [step * (size - 1) for step, size in zip(module.dilation, module.kernel_size)]
    if any(total % 2 for total in totals):
        raise InvalidArgumentError(
            f'{name} has padding="same" with a kernel of {module.kernel_size}, which pads one side more than the '
            "other. Leave it out, or give numbers for padding."
        )
    return tuple(total // 2 for total in totals)
