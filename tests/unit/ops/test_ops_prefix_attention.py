from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from slurmrl.tensors.ops.attention import (
    Packing,
    Prefix,
    PrefixPacking,
    packed_attention,
    prefix_attention,
    prefix_attention_works,
)

PIECES = (2, 3, 3, 5, 4, 4, 1, 6)
PARENTS = {0: 3, 1: 3, 4: 3, 2: 7, 6: 7}
"""Pieces that continue others; 5 is a sequence of its own."""
SCALE = 0.3
HEADS, SIZE = 4, 8


def packing() -> PrefixPacking:
    starts = [0, *accumulate(PIECES)]
    prefixes, readers = [], []
    for parent in sorted(set(PARENTS.values())):
        children = [child for child, of in PARENTS.items() if of == parent]
        places = [place for child in children for place in range(starts[child], starts[child + 1])]
        prefixes.append(Prefix(starts[parent], PIECES[parent], len(places)))
        readers.extend(places)
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    return PrefixPacking(Packing(cu_seqlens, max(PIECES)), prefixes, torch.tensor(readers))


def whole_sequences(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return each piece's part of the attention over its whole sequence, computed separately."""
    pieces = [x.split_with_sizes(PIECES) for x in (q, k, v)]
    outputs = []
    for piece in range(len(PIECES)):
        places = [PARENTS[piece], piece] if piece in PARENTS else [piece]
        whole = [torch.cat([part[place] for place in places]) for part in pieces]
        length = whole[0].shape[0]
        alone = Packing(torch.tensor([0, length], dtype=torch.int32), length)
        q, k, v = whole
        outputs.append(packed_attention(q, k, v, alone, SCALE)[-PIECES[piece] :])
    return torch.cat(outputs)


def inputs(kv_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = [(sum(PIECES), heads, SIZE) for heads in (HEADS, kv_heads, kv_heads)]
    drawn = [torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes]
    q, k, v = ((3 * x).to(dtype).requires_grad_() for x in drawn)
    return q, k, v


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.1)]
)
def test_prefix_attention_equals_attention_over_whole_sequences(
    kv_heads: int, dtype: torch.dtype, near: float
) -> None:
    assert prefix_attention_works()
    leaves, exact = inputs(kv_heads, dtype), inputs(kv_heads, dtype)
    out = prefix_attention(*leaves, packing(), SCALE)
    q, k, v = (x.double() for x in exact)
    wanted = whole_sequences(q, k, v)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), wanted, rtol=near, atol=near)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).double()
    (wanted * weights).sum().backward()  # type: ignore[no-untyped-call]
    (out.double() * weights).sum().backward()  # type: ignore[no-untyped-call]
    for leaf, right in zip(leaves, exact, strict=True):
        assert leaf.grad is not None
        assert right.grad is not None
        torch.testing.assert_close(leaf.grad, right.grad, rtol=near, atol=near)


def test_scores_of_very_different_size_are_merged() -> None:
    """The normalizer of one part overflows exp() in float32, or is negligible."""
    for factor in (300.0, -300.0):
        q, k, v = (x.detach() for x in inputs(2, torch.float32))
        start, length = packing().prefixes[0].start, packing().prefixes[0].length
        k[start : start + length] *= factor
        out = prefix_attention(q, k, v, packing(), SCALE)
        wanted = whole_sequences(q.double(), k.double(), v.double())
        torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-4)
