"""Attention with sinks equals the softmax over all scores and one more, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.tensors.ops.attention import Packing
from slurmrl.tensors.ops.paged_kernels import paged_attention, reference
from slurmrl.tensors.ops.sink_attention import causal_attention
from tests.support.paged_cases import PAGE, case, exact

SCALE = 0.4
SINKS = torch.tensor([-3.0, 0.5, 2.0, 40.0])


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, lengths: tuple[int, ...], window: int | None
) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    outputs = []
    for qs, ks, vs in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        scores = torch.einsum("ihd,jhd->hij", qs, ks) * SCALE
        pairs = torch.ones(scores.shape[-2:], dtype=torch.bool)
        unseen = pairs.triu(1) | pairs.tril(-(window or len(pairs)))
        extra = sinks[:, None, None].expand(-1, len(qs), 1)
        both = torch.cat((scores.masked_fill(unseen, -torch.inf), extra), -1).softmax(-1)
        outputs.append(torch.einsum("hij,jhd->ihd", both[..., :-1], vs))
    return torch.cat(outputs)


@pytest.mark.parametrize("lengths", [(5, 5, 1), (2, 0, 30), (300,)])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 1, 7])
def test_results_and_gradients_equal_float64(
    lengths: tuple[int, ...], kv_heads: int, window: int | None
) -> None:
    tokens = sum(lengths)
    packing = Packing(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), max(lengths))
    inputs = [numbers(tokens, n, 8, seed=i) for i, n in enumerate((4, kv_heads, kv_heads))]
    mix, results = numbers(tokens, 4, 8, seed=9), []
    for wide in (False, True):
        leaves = [(x.double() if wide else x.clone()).requires_grad_() for x in (*inputs, SINKS)]
        q, k, v, sinks = leaves
        if wide:
            out = whole(q, k, v, sinks, lengths, window)
        else:
            out = causal_attention(q, k, v, packing, SCALE, window, sinks)
        (out * mix).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, wanted in zip(*results, strict=True):
        assert ours is not None
        assert wanted is not None
        assert (ours - wanted).abs().max() < 2e-6 * max(1.0, float(wanted.abs().max()))


LENGTHS, ROWS = (40, 1, 17, 16, 15, 64, 5), (0, 1, 2, 2, 3, 4, 3)


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_cached_attention_equals_float64(kv_heads: int, window: int | None) -> None:
    """Covers the compiled and the torch implementation."""
    inputs = case(LENGTHS, ROWS, 4, kv_heads, 20, unread=1e4)
    wide = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    wanted = reference(*wide, PAGE, 64, SCALE, window, SINKS.double())
    plain = exact(inputs, SCALE, window)
    assert (wanted[:, 3].abs().max(), wanted[:, 0].allclose(plain[:, 0], atol=1e-3)) < (1e-9, True)
    options: dict[str, Any] = {"page": PAGE, "longest": 64, "scale": SCALE, "window": window}
    assert (paged_attention(*inputs, **options, sinks=SINKS) - wanted).abs().max() < 2e-6
    torchs = reference(*inputs, PAGE, 64, SCALE, window, SINKS)
    assert (torchs - wanted).abs().max() < 2e-6
