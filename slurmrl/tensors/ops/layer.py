"""A layer of a decoder as one compiled call for the tokens of a decode step on a CPU: with few
tokens, the calls of its parts take longer than what they compute.

T tokens, h hidden size, i inner units, R rows, N pages of a row, C cells of the cache, Hq query
heads, Hkv key and value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slurmrl.tensors.ops.native.load import for_floats
from slurmrl.tensors.ops.products import PackedMatrix


@dataclass(frozen=True)
class RootMeanSquare:
    """A root-mean-square norm."""

    weight: Tensor
    """[h]"""
    eps: float


class PackedLayer:
    """y = x + o(attention(qkv(norm(x)))), and y + down(silu(gate) * up), where gate and up are the
    halves of gate_up(norm(y)). The weights are copied to one tensor, of which the matrices here are
    views."""

    def __init__(
        self,
        norms: tuple[RootMeanSquare, RootMeanSquare],
        qkv: PackedMatrix,
        o: PackedMatrix,
        gate_up: PackedMatrix,
        down: PackedMatrix,
    ) -> None:
        """qkv: h -> (Hq + 2 Hkv) D; o: Hq D -> h; gate_up: h -> 2i; down: i -> h."""
        first, second = norms
        parts = [first.weight, *_of(qkv), *_of(o), second.weight, *_of(gate_up), *_of(down)]
        self._weights = torch.cat([part.detach().flatten() for part in parts])
        views = self._weights.split_with_sizes([part.numel() for part in parts])
        self.qkv = PackedMatrix(views[1].view_as(qkv.packed), views[2], qkv.outer)
        self.o = PackedMatrix(views[3].view_as(o.packed), views[4], o.outer)
        self.gate_up = PackedMatrix(views[6].view_as(gate_up.packed), views[7], gate_up.outer)
        self.down = PackedMatrix(views[8].view_as(down.packed), views[9], down.outer)
        self._eps = (first.eps, second.eps)

    def decode(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        tables: Tensor,
        rows: Tensor,
        lengths: Tensor,
        *,
        page: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """x [T, h] -> [T, h], with the attention of `tensors.ops.paged_attention.attend_heads`."""
        out = torch.empty_like(x)
        size = keys.shape[2]
        heads = self.qkv.outer // size - 2 * keys.shape[1]
        cos, sin = rotation or (None, None)
        places = (keys, values, slots, tables, rows, lengths)
        sizes = (heads, self.gate_up.outer // 2, page, scale, window or 0)
        for_floats(x).layer.default(x, self._weights, cos, sin, *places, out, *sizes, *self._eps)
        return out


def _of(matrix: PackedMatrix) -> tuple[Tensor, Tensor]:
    bias = matrix.bias
    return matrix.packed, matrix.packed.new_zeros(matrix.outer) if bias is None else bias
