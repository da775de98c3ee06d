"""The projection of VeLoRA: a token's features cut into sub-tokens, each kept as one number.

X is (N tokens, D features); a token is cut into g sub-tokens of size M = ceil(D / num_groups), the last one padded with
zeros where M does not divide D. v is one unit vector of size M. Kept: Z = <sub-token, v>, (N, g), instead of X.

    C = dY^T Z  (out, g)          dW[o, j M + s] = C[o, j] v[s]

so dW is an outer product and X is never rebuilt. Source: Miles et al. 2024, arXiv 2405.17991.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from leantune.errors import InvalidArgumentError, NonFiniteError

_TILE_ELEMENTS = 1 << 18
"""Elements reduced at a time: 1 MiB in fp32."""


@dataclass(frozen=True)
class SubTokens:
    """How ``features`` are cut: ``groups`` sub-tokens of ``size``; the last holds ``tail`` features (``size`` when
    nothing is padded).

    >>> SubTokens.of(1536, 32), SubTokens.of(10, 4)
    (SubTokens(features=1536, size=48, groups=32), SubTokens(features=10, size=3, groups=4))
    """

    features: int
    size: int
    groups: int

    @classmethod
    def of(cls, features: int, num_groups: int) -> "SubTokens":
        """Cut ``features`` into at most ``num_groups`` sub-tokens; raises InvalidArgumentError where that is
        impossible."""
        if not isinstance(num_groups, int) or not 1 <= num_groups <= features:
            raise InvalidArgumentError(
                f"num_groups is {num_groups!r}; a layer of {features} features can be cut into 1 to {features} "
                f"sub-tokens."
            )
        size = -(-features // num_groups)
        return cls(features, size, -(-features // size))

    @property
    def whole(self) -> int:
        """Features in sub-tokens that are full."""
        return self.features // self.size * self.size


def mean_direction(x: Tensor, cut: SubTokens) -> Tensor | None:
    """v, fp32 (size,): the normalised mean of all sub-tokens of ``x`` (N, D).

    None where x has no row or holds zeros alone: such a batch has no direction, and its weight gradient is zero anyway.
    Raises NonFiniteError where the mean is NaN or Inf, InvalidArgumentError where sub-tokens that are not zero cancel.
    """
    if x.shape[0] == 0:
        return None
    wide = torch.promote_types(x.dtype, torch.float32)
    column = x.new_zeros(cut.features, dtype=wide)
    for rows in _row_tiles(x):
        column += rows.sum(dim=0, dtype=wide)
    column /= x.shape[0]
    padded = torch.nn.functional.pad(column, (0, cut.groups * cut.size - cut.features))
    mean = padded.view(cut.groups, cut.size).mean(dim=0)
    norm = torch.linalg.vector_norm(mean)
    if mean.device.type == "meta":
        return mean
    if not bool(torch.isfinite(norm)):
        raise NonFiniteError("the first batch's activations hold NaN or Inf, so VeLoRA has no direction to project on.")
    if float(norm) == 0:
        if not bool(x.any()):
            return None
        raise InvalidArgumentError(
            "the sub-tokens of the first training batch average to zero, so VeLoRA has no direction to project on. "
            "Leave this layer out of target_modules, or use another num_groups."
        )
    return (mean / norm).float()


def _row_tiles(x: Tensor) -> Iterator[Tensor]:
    """``x`` (N, D) some rows at a time: a CPU reduces bf16 by way of an fp32 copy of what it is given."""
    return iter(x.split(max(1, _TILE_ELEMENTS // max(1, x.shape[1]))))


def project(x: Tensor, v: Tensor, cut: SubTokens) -> Tensor:
    """Z, (N, groups), in x's dtype, from ``x`` (N, D) and ``v`` (size,); no temporary of X's size."""
    v = v.to(x.dtype)
    if cut.whole == cut.features:
        return x.reshape(x.shape[0], cut.groups, cut.size) @ v
    parts = [x[:, cut.whole :] @ v[: cut.features - cut.whole]]
    if cut.whole:
        full = x[:, : cut.whole].unflatten(1, (cut.groups - 1, cut.size)) @ v
        return torch.cat([full, parts[0].unsqueeze(1)], dim=1)
    return parts[0].unsqueeze(1)


def weight_gradient(grad_output: Tensor, z: Tensor, v: Tensor, cut: SubTokens) -> Tensor:
    """dW, (out, D), from dY (N, out), Z (N, groups) and v: the outer product of C = dY^T Z with v, its padding cut
    off."""
    # In fp32: small, and rounded once when the product with v is.
    wide = torch.promote_types(grad_output.dtype, torch.float32)
    coefficients = grad_output.t().to(wide) @ z.to(wide)
    return (
        (coefficients.unsqueeze(2) * v.to(coefficients.dtype))
        .flatten(1)[:, : cut.features]
        .to(grad_output.dtype)
        .contiguous()
    )


def kept_energy(x: Tensor, z: Tensor) -> Tensor:
    """|Z|^2 / |X|^2, fp32 of no dimensions: the share of the activations' energy that the projection keeps."""
    wide = torch.promote_types(x.dtype, torch.float32)
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.new_zeros((), dtype=wide)
    for rows in _row_tiles(x.detach().reshape(-1, x.shape[-1])):
        total += torch.linalg.vector_norm(rows, dtype=wide).square()
    return torch.linalg.vector_norm(z.detach(), dtype=wide).square() / total.clamp(min=1e-30)
