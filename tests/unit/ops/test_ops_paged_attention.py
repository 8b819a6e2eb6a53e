from __future__ import annotations

from typing import Any

import pytest
import torch

from slurmrl.tensors.ops.paged_kernels import paged_attention, reference

PAGE, PAGES, ROWS, LONGEST = 4, 90, 9, 40


def case(size: int, heads: int = 4, kv_heads: int = 2) -> tuple[Any, ...]:
    """q, keys, values, tables, rows and lengths of nine tokens; page numbers in random order."""
    generator = torch.Generator().manual_seed(size)
    draw = {"generator": generator}
    keys, values = (torch.randn(PAGES * PAGE, kv_heads, size, **draw) for _ in range(2))
    tables = torch.randperm(PAGES, **draw).view(ROWS, -1)
    rows = torch.randint(0, ROWS, (9,), **draw)
    lengths = torch.randint(1, LONGEST + 1, (9,), **draw)
    return torch.randn(9, heads, size, **draw), keys, values, tables, rows, lengths


def plain(inputs: tuple[Any, ...], scale: float, window: int | None) -> torch.Tensor:
    """Softmax attention, token by token and head by head."""
    q, keys, values, tables, rows, lengths = (
        x.double() if x.is_floating_point() else x for x in inputs
    )
    out = torch.empty_like(q)
    for t in range(len(q)):
        length = int(lengths[t])
        first = 0 if window is None else max(0, length - window)
        cells = [int(tables[rows[t], c // PAGE]) * PAGE + c % PAGE for c in range(first, length)]
        for head in range(q.shape[1]):
            own = head // (q.shape[1] // keys.shape[1])
            weights = (keys[cells, own] @ q[t, head] * scale).softmax(0)
            out[t, head] = weights @ values[cells, own]
    return out


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("size", [6, 16, 20, 64, 70])
def test_each_token_attends_to_its_cells(size: int, window: int | None) -> None:
    inputs, scale = case(size), 0.3
    wanted = plain(inputs, scale, window)
    found = paged_attention(*inputs, page=PAGE, longest=LONGEST, scale=scale, window=window)
    assert (found - wanted).abs().max() < 2e-6
    gathered = reference(*inputs, PAGE, LONGEST, scale, window)
    assert (gathered - wanted).abs().max() < 2e-6


def test_large_scores_do_not_overflow() -> None:
    q, keys, *others = case(16)
    inputs = (q * 100, keys * 100, *others)
    found = paged_attention(*inputs, page=PAGE, longest=LONGEST, scale=1.0, window=None)
    assert (found - plain(inputs, 1.0, None)).abs().max() < 1e-4


def test_a_token_does_not_depend_on_the_others() -> None:
    """Bit for bit in the compiled form, whatever else is in the call."""
    q, keys, values, tables, rows, lengths = case(20)
    options: dict[str, Any] = {"page": PAGE, "longest": LONGEST, "scale": 0.3, "window": None}
    together = paged_attention(q, keys, values, tables, rows, lengths, **options)
    for t in range(len(q)):
        part = slice(t, t + 1)
        alone = paged_attention(q[part], keys, values, tables, rows[part], lengths[part], **options)
        assert torch.equal(alone, together[part])
