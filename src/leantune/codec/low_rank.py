"""The low-rank carry: the coherent part of a matrix, kept as C = U V^T beside the trits that keep the rest.

One warm-started power iteration a step (subspace iteration; U orthonormal): W = M V, U = orth(W), V' = M^T U.
Everything that crosses rows is the r x r Gram matrix W^T W and M^T W (cols x r), so M is only ever seen a tile of rows
at a time: with W^T W = Q diag(lambda) Q^T, U = W Q lambda^-1/2 and V' = (M^T W) Q lambda^-1/2.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from leantune.codec.counter_hash import low_fraction, random_bits

_SMALLEST = 1e-60
"""Eigenvalues below this are nothing: their inverse roots would leave float32."""
_SMALLEST_SHARE = 1e-10
"""Directions whose eigenvalue is below this share of the largest are numerically absent."""


def initial_basis(cols: int, rank: int, key: int, device: torch.device) -> Tensor:
    """fp32 (cols, rank) of hash noise in [-0.5, 0.5): the start of the power iteration."""
    return low_fraction(random_bits(key, 0, rank, 0, 1, cols, device)).sub_(0.5).view(rank, cols).t()


class PowerIteration:
    """One iteration for a (rows, cols) matrix M given in tiles of whole rows.

    ``basis``: the previous V, (cols, rank). Holds rows * rank + cols * rank fp32 numbers while it runs.
    """

    def __init__(self, rows: int, basis: Tensor, key: int) -> None:
        cols, rank = basis.shape
        norms = torch.linalg.vector_norm(basis, dim=0)
        self._basis = torch.where(norms > 0, basis / norms, initial_basis(cols, rank, key, basis.device))
        self._rows = basis.new_empty((rows, rank))
        self._columns = basis.new_zeros((cols, rank))
        self._gram = torch.zeros((rank, rank), dtype=torch.float64, device=basis.device)

    @property
    def basis(self) -> Tensor:
        """V, fp32 (cols, rank), its columns of unit length (hash noise where there was none)."""
        return self._basis

    def add(self, top: int, matrix: Tensor) -> None:
        """Take rows [top, top + len(matrix)) of M, fp32 (len, cols)."""
        product = matrix @ self._basis
        self._rows[top : top + matrix.shape[0]] = product
        self._columns.addmm_(matrix.t(), product)
        self._gram += (product.t() @ product).double()

    def set(self, product: Tensor, columns: Tensor, gram: Tensor) -> None:
        """Take W = M V, M^T W and W^T W as a kernel computed them for the whole of M, instead of :meth:`add`."""
        self._rows, self._columns, self._gram = product, columns, gram

    def finish(self, total: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """(U, V') as stored: bfloat16 (rows, rank) and (cols, rank). An absent direction has a zero column in both.

        ``total`` sums a tensor over the processes that hold the other rows of M (or gives it back, where all are here).
        """
        self._columns, self._gram = total(self._columns), total(self._gram)
        values, vectors = torch.linalg.eigh(self._gram)
        present = values > (values[-1] * _SMALLEST_SHARE).clamp(min=_SMALLEST)
        inverse_root = torch.where(present, values.clamp(min=1e-300).rsqrt(), 0.0)
        turn = (vectors * inverse_root).float()
        return (self._rows @ turn).to(torch.bfloat16), (self._columns @ turn).to(torch.bfloat16)
