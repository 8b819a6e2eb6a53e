"""The sum of a frozen weight and its low-rank adapter, with the same bits wherever it is computed.
Torch-free.

o outputs, i inputs, r rank of the adapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from slurmrl.tensors.layout.copy import Array

if TYPE_CHECKING:
    from torch import Tensor

Matrix = TypeVar("Matrix", Array, "Tensor")
BLOCK = 2**18
"""Elements that stay in the cache of a processor's core while all products are added."""


def merge(
    out: Matrix, weight: Matrix, b: Matrix, a: Matrix, scale: float, *, block: int = BLOCK
) -> None:
    """Write weight + scale * b a into ``out`` [o, i]: in float32, then rounded to the type of
    ``out``. ``weight`` [o, i] is of float32 or a narrower type, ``b`` [o, r] and ``a`` [r, i] are
    float32; all four are NumPy arrays, or tensors on one device.

    A matrix product may add its terms in another order for another number of rows or columns, on
    another processor or in another library. Here each product and each sum of two elements is
    rounded by itself, and the terms are added in the order of r. So the bits of an element depend
    neither on the rows and columns that are given nor on ``block``, the number of elements merged
    at a time.
    """
    rows, columns = out.shape
    each = max(1, block // max(1, columns))
    for first in range(0, rows, each):
        part = slice(first, first + each)
        delta = b[part, :1] * a[:1]
        for term in range(1, a.shape[0]):
            delta += b[part, term : term + 1] * a[term : term + 1]
        delta *= scale
        delta += weight[part]
        out[part] = delta
