"""The low-rank carry: the coherent part of a matrix, kept as C = U V^T beside the trits that keep the rest.

V (cols x r, orthonormal) follows the leading right singular vectors of M by one step of orthogonal iteration a step,
and U = M V projects M onto it as it is now:

    U = M V,   C = U V^T,   Y = M^T U,   V' = orth(Y)

V' serves the next step. What crosses rows, Y (cols x r), is therefore needed only once all rows are done: M is seen
once, a tile of rows at a time, and rows that lie on several processes cost one sum.
"""

import torch
from torch import Tensor

from leantune.codec.counter_hash import low_fraction, random_bits

_SHIFT = 2.0**-17
"""Share of the previous V that stays in V', relative to |Y|: a direction that M lacks is kept, not lost."""


def initial_basis(cols: int, rank: int, key: int, device: torch.device) -> Tensor:
    """V to start from: orthonormal hash noise, bfloat16 (cols, rank)."""
    noise = low_fraction(random_bits(key, 0, rank, 0, 1, cols, device)).sub_(0.5).view(rank, cols).t()
    return next_basis(noise, noise)


def next_basis(products: Tensor, basis: Tensor) -> Tensor:
    """V' = orth(Y + shift V), bfloat16 (cols, rank), from Y = M^T M V and V; ``products``: fp32 (cols, rank).

    Gram-Schmidt in the order of the columns, by the Cholesky factor of the fp64 Gram matrix.
    """
    shift = torch.linalg.vector_norm(products).mul_(_SHIFT).clamp_(min=1e-30)
    shifted = torch.addcmul(products, basis.float(), shift)
    wide = shifted.double()
    triangle = torch.linalg.cholesky_ex(wide.t() @ wide).L
    return torch.linalg.solve_triangular(triangle, wide.t(), upper=False).t().to(torch.bfloat16)
