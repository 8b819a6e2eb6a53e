"""Frozen weights with merged adapters have the same bits for any partition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slurmrl.models.adapters import merge

SCALE = 5 / 3
EDGES = ((0, 1, 8, 8, 21), (0, 2, 5, 67))
"""Where rows and columns are cut; one part has no rows."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 3, 16])
def test_merging_parts_equals_merging_the_whole_bit_by_bit(dtype: torch.dtype, rank: int) -> None:
    """Parts have odd rows and columns or one row, for weights as large as their product."""
    generator = torch.Generator().manual_seed(rank)
    rows, columns = (edges[-1] for edges in EDGES)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    b = torch.randn(rows, rank, generator=generator)
    a = torch.randn(rank, columns, generator=generator)
    whole, parts = torch.empty_like(weight), torch.empty_like(weight)
    merge(whole, weight, b, a, SCALE)
    for top, bottom in zip(EDGES[0], EDGES[0][1:], strict=False):
        for left, right in zip(EDGES[1], EDGES[1][1:], strict=False):
            box = slice(top, bottom), slice(left, right)
            merge(parts[box], weight[box], b[box[0]], a[:, box[1]].contiguous(), SCALE, block=1)
    assert torch.equal(parts, whole)
    wide = np.empty((rows, columns), np.float32)
    merge(wide, weight.float().numpy(), b.numpy(), a.numpy(), SCALE)
    assert torch.equal(torch.from_numpy(wide).to(dtype), whole)
    exact = weight.double() + SCALE * (b.double() @ a.double())
    bound = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(whole.double(), exact, rtol=bound, atol=bound / 10)
