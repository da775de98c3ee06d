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

from leantune.errors import InvalidArgumentError

_TILE_ELEMENTS = 1 << 18
"""Elements reduced at a time: 1 MiB in fp32."""
_OUTER_ELEMENTS = 1 << 21
"""Elements of dW made in fp32 at a time where it is narrower: 8 MiB."""


@dataclass(frozen=True)
class SubTokens:
    """How ``features`` are cut: ``groups`` sub-tokens of ``size``, the last one padded where ``size`` does not divide
    them.

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

    @property
    def tail(self) -> int:
        """Features in the last sub-token, where it is not full; else 0."""
        return self.features - self.whole


def project(x: Tensor, v: Tensor, cut: SubTokens) -> Tensor:
    """Z, (N, groups), in x's dtype, from ``x`` (N, D) and ``v`` (size,); no temporary of X's size."""
    v = v.to(x.dtype)
    if not cut.tail:
        return x.reshape(x.shape[0], cut.groups, cut.size) @ v
    tail = (x[:, cut.whole :] @ v[: cut.tail]).unsqueeze(1)
    if not cut.whole:
        return tail
    whole = x[:, : cut.whole].unflatten(1, (cut.groups - 1, cut.size))
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.cat([whole @ v, tail], dim=1)
    # oneDNN copies rows that do not follow one another: a tile of them at a time.
    return torch.cat([torch.cat([rows @ v for rows in row_tiles(whole)]), tail], dim=1)


def outer_product(coefficients: Tensor, v: Tensor, cut: SubTokens, dtype: torch.dtype) -> Tensor:
    """dW, (out, D, ...) of ``dtype``, from C (out, groups, ...) and v: dW[o, j M + s] = C[o, j] v[s].

    Each element is made in C's dtype and rounded once. Temporaries: at most 8 MiB, none where ``dtype`` is C's.
    """
    rows, _, *rest = coefficients.shape
    v = v.to(coefficients.dtype).view(-1, *(1 for _ in rest))
    if torch.compiler.is_compiling():  # fused there; and out= is not for a compiler
        return (coefficients.unsqueeze(2) * v).flatten(1, 2)[:, : cut.features].to(dtype).contiguous()
    gradient = coefficients.new_empty((rows, cut.features, *rest), dtype=dtype)
    for some, groups, tokens in _outer_tiles(gradient, cut, everything=dtype == coefficients.dtype):
        part = coefficients[some, groups].unsqueeze(2)
        torch.mul(part, v, out=gradient[some, tokens].unflatten(1, (part.shape[1], cut.size)))
    if cut.tail:
        torch.mul(coefficients[:, -1:], v[: cut.tail], out=gradient[:, cut.whole :])
    return gradient


def outer_strips(coefficients: Tensor, v: Tensor, cut: SubTokens, transposed: bool) -> Iterator[tuple[int, Tensor]]:
    """`outer_product` some rows of the weight at a time: (first row, rows (n, cols) in C's dtype).

    C is (out, groups, ...), or (groups, out) where the weight is ``transposed``, (D, out). A strip has 8 MiB in fp32,
    or what one row (transposed: one sub-token) takes.
    """
    if transposed:
        width = max(1, _OUTER_ELEMENTS // (cut.size * coefficients.shape[1]))
        for left in range(0, cut.groups, width):
            some = coefficients[None, left : left + width]
            features = min(some.shape[1] * cut.size, cut.features - left * cut.size)
            part = SubTokens(features, cut.size, some.shape[1])
            yield left * cut.size, outer_product(some, v, part, coefficients.dtype)[0]
        return
    height = max(1, _OUTER_ELEMENTS // (cut.features * coefficients[0, 0].numel()))
    for top in range(0, coefficients.shape[0], height):
        rows = outer_product(coefficients[top : top + height], v, cut, coefficients.dtype)
        yield top, rows.flatten(1)


def _outer_tiles(gradient: Tensor, cut: SubTokens, everything: bool) -> Iterator[tuple[slice, slice, slice]]:
    """(rows, groups, features) of the parts of dW (rows, features, ...) in which full sub-tokens are made."""
    rows, full = gradient.shape[0], cut.whole // cut.size
    line = max(1, gradient[:1].numel())
    height, width = max(1, _OUTER_ELEMENTS // line), full
    if everything:
        height = rows
    elif height == 1:
        width = max(1, _OUTER_ELEMENTS * cut.groups // line)
    for top in range(0, rows, max(1, height)):
        for left in range(0, full, max(1, width)):
            right = min(left + width, full)
            yield slice(top, top + height), slice(left, right), slice(left * cut.size, right * cut.size)


def group_norms(v: Tensor, cut: SubTokens) -> Tensor:
    """|v| as each group sees it, fp64 (groups,): of the last, padded one without what is multiplied by padding."""
    norms = torch.linalg.vector_norm(v.double()).expand(cut.groups).clone()
    if cut.tail:
        norms[-1] = torch.linalg.vector_norm(v[: cut.tail].double())
    return norms


def kept_energy(x: Tensor, z: Tensor) -> Tensor:
    """|Z|^2 / |X|^2, fp32 of no dimensions: the share of the activations' energy that the projection keeps."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.new_zeros((), dtype=wide)
    for rows in row_tiles(x.detach().reshape(-1, x.shape[-1])):
        total += torch.linalg.vector_norm(rows, dtype=wide).square()
    return torch.linalg.vector_norm(z.detach(), dtype=wide).square() / total.clamp(min=1e-30)


def row_tiles(x: Tensor) -> Iterator[Tensor]:
    """``x`` (N, ...) some rows at a time: a CPU reduces bf16 by way of an fp32 copy of what it is given."""
    return iter(x.split(max(1, _TILE_ELEMENTS // max(1, x.shape[1:].numel()))))
