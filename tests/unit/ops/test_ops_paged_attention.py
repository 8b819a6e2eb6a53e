from __future__ import annotations

from typing import Any

import pytest
import torch

from slurmrl.tensors.ops.paged_kernels import paged_attention, reference
from tests.support.paged_cases import PAGE, case, exact

LENGTHS = (40, 1, 17, 16, 15, 33, 2, 64, 5)
ROWS = (0, 1, 2, 2, 3, 4, 5, 6, 3)
OPTIONS: dict[str, Any] = {"page": PAGE, "longest": 64, "scale": 0.3, "window": None}


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("size", [6, 16, 20, 64, 70])
def test_each_token_attends_to_its_own_cells(size: int, window: int | None) -> None:
    inputs = case(LENGTHS, ROWS, 4, 2, size, unread=1e4)
    wanted = exact(inputs, 0.3, window)
    found = paged_attention(*inputs, **{**OPTIONS, "window": window})
    assert (found - wanted).abs().max() < 2e-6
    gathered = reference(*inputs, PAGE, 64, 0.3, window)
    assert (gathered - wanted).abs().max() < 2e-6


def test_large_scores_do_not_overflow() -> None:
    q, keys, *others = case(LENGTHS, ROWS, 4, 2, 16)
    inputs = (q * 100, keys * 100, *others)
    found = paged_attention(*inputs, **{**OPTIONS, "scale": 1.0})
    assert (found - exact(inputs, 1.0, None)).abs().max() < 1e-4


def test_token_output_does_not_depend_on_other_tokens() -> None:
    """In the compiled form, outputs have the same bits for any other tokens in the call."""
    q, keys, values, tables, rows, lengths = case(LENGTHS, ROWS, 4, 2, 20)
    together = paged_attention(q, keys, values, tables, rows, lengths, **OPTIONS)
    for t in range(len(q)):
        part = slice(t, t + 1)
        alone = paged_attention(q[part], keys, values, tables, rows[part], lengths[part], **OPTIONS)
        assert torch.equal(alone, together[part])
