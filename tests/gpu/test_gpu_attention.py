"""Packed attention on a real GPU, with the kernels for packed tokens and without them, against
float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slurmrl.tensors.ops import attention
from slurmrl.tensors.ops.attention import Packing, packed_attention
from slurmrl.tensors.ops.sink_attention import causal_attention

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device on this machine"
)

LENGTHS = {
    "one-token": (1, 1, 1),
    "mixed": (1, 300, 7, 129, 1, 64, 300),
    "long": (3000, 1, 500),
    "empty": (0, 5, 0, 9),
}
SCALE = 0.2
TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
"""Largest error allowed, as a share of the largest value."""


def reference(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], window: int | None
) -> Tensor:
    """Compute each sequence separately with an explicit softmax."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    outputs = []
    for qs, ks, vs in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        scores = torch.einsum("ihd,jhd->hij", qs, ks) * SCALE
        pairs = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        unseen = pairs.triu(1) | pairs.tril(-(window or len(pairs)))
        mixed = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hij,jhd->ihd", mixed, vs))
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (8, 2), (6, 1)])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("size", [64, 128])
def test_attention_forward_and_backward_equal_float64(
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    q_heads: int,
    kv_heads: int,
    window: int | None,
    size: int,
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    heads = (q_heads, kv_heads, kv_heads, q_heads)
    q, k, v, mix = (
        torch.randn(sum(lengths), n, size, generator=generator, device="cuda").to(dtype)
        for n in heads
    )
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    assert attention.flash_fits(q) == (dtype == torch.bfloat16)
    results = []
    for exact in (False, True):
        leaves = [(x.double() if exact else x).clone().requires_grad_() for x in (q, k, v)]
        if exact:
            out = reference(*leaves, lengths, window)
        else:
            out = packed_attention(*leaves, Packing(cu, max(lengths)), SCALE, window)
        (out * mix).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, expected in zip(*results, strict=True):
        assert ours is not None
        assert expected is not None
        allowed = TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))
        assert (ours - expected).abs().max() <= allowed


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_attention_with_sinks_equals_float64(
    dtype: torch.dtype, window: int | None, kv_heads: int
) -> None:
    lengths = (300, 7, 7, 1)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, mix = (
        torch.randn(sum(lengths), n, 64, generator=generator, device="cuda").to(dtype)
        for n in (4, kv_heads, kv_heads, 4)
    )
    sinks = torch.tensor([-2.0, 0.0, 1.5, 4.0], device="cuda").to(dtype)
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    results = []
    for exact in (False, True):
        leaves = [(x.double() if exact else x).clone().requires_grad_() for x in (q, k, v, sinks)]
        if exact:
            out = with_all_scores(*leaves, lengths, window)
        else:
            packing = Packing(cu, max(lengths))
            out = causal_attention(*leaves[:3], packing, SCALE, window, leaves[3])
        (out * mix).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, expected in zip(*results, strict=True):
        assert ours is not None
        assert expected is not None
        allowed = TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))
        assert (ours - expected).abs().max() <= allowed


def with_all_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    lengths: tuple[int, ...],
    window: int | None,
) -> Tensor:
    """Compute attention from all scores of each sequence and the sinks."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    outputs = []
    for qs, ks, vs in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        scores = torch.einsum("ihd,jhd->hij", qs, ks) * SCALE
        pairs = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda")
        unseen = pairs.triu(1) | pairs.tril(-(window or len(pairs)))
        extra = sinks[:, None, None].expand(-1, len(qs), 1)
        both = torch.cat((scores.masked_fill(unseen, -torch.inf), extra), -1).softmax(-1)
        outputs.append(torch.einsum("hij,jhd->ihd", both[..., :-1], vs))
    return torch.cat(outputs)


def test_attention_accepts_an_empty_batch() -> None:
    q = torch.zeros(0, 2, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    cu = torch.zeros(1, dtype=torch.int32)
    packed_attention(q, q, q, Packing(cu, 0), SCALE).sum().backward()
    assert q.grad is not None
