"""Packed sequences as the input of megatron's layers.

T packed tokens, S sequences. Ranks along the context axis hold equal consecutive parts of the
packed tokens, padded with a last sequence of their own; attention sees whole sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slurmrl.models.packed import inverse, length_order, packed_positions
from slurmrl.models.rotary import RotaryTable, Rotation
from slurmrl.models.routes import UNKNOWN
from slurmrl.tensors.ops.attention import Packing
from slurmrl.tensors.ops.support import Support
from slurmrl.tensors.ops.upload import upload


@dataclass
class Packed(PackedSeqParams):  # type: ignore[misc]
    """A micro-batch's offsets and rotation, which attention needs."""

    packing: Packing | None = None
    rotation: Rotation | None = None


@dataclass(frozen=True)
class Micro:
    """One micro-batch: sequences of equal length side by side, then padding."""

    ids: Tensor
    """[T + padding]"""
    cu_seqlens: Tensor
    """In host memory; the padding is a sequence of its own."""
    back: Tensor
    """[T] index of each token of the sample's order."""
    params: Packed
    real: Tensor | None = None
    """[T + padding] whether a token belongs to the batch; None where routers need no mask."""
    support: Support | None = None
    """Of T + padding tokens; None: all were drawn from the whole vocabulary."""
    experts: Tensor | None = None
    """[T + padding, L, K] recorded experts in the blocks that have some; None: no record."""


def micro_batch(
    ids: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    multiple: int,
    rotary: RotaryTable,
    dtype: torch.dtype,
    support: Support | None = None,
    experts: Tensor | None = None,
) -> Micro:
    """ids [T], cu_seqlens [S+1] int32 in host memory; the padded length is a multiple of
    ``multiple``."""
    tokens = ids.shape[0]
    order, cu_sorted = length_order(cu_seqlens, tokens)
    padding = -tokens % multiple
    if padding:
        cu_sorted = torch.cat((cu_sorted, cu_sorted[-1:] + padding))
    indices = (order, inverse(order), packed_positions(cu_sorted, tokens + padding))
    order, back, positions = upload(indices, ids.device)
    padded = torch.cat((ids[order], ids.new_zeros(padding)))
    params = Packed(
        qkv_format="thd",
        packing=Packing(cu_sorted, max(longest, padding)),
        rotation=rotary.rotation(positions, dtype),
    )
    drawn_from = None if support is None else support.at(order).padded(padding)
    if experts is not None:
        unknown = experts.new_full((padding, *experts.shape[1:]), UNKNOWN)
        experts = torch.cat((experts[order], unknown))
    return Micro(padded, cu_sorted, back, params, support=drawn_from, experts=experts)
