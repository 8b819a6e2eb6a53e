from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from slurmrl.errors import UsageError
from slurmrl.tensors.ops import attention
from slurmrl.tensors.ops import attention as attention_module
from slurmrl.tensors.ops.attention import (
    Packing,
    Run,
    cache_bias,
    cached_attention,
    packed_attention,
)

SCALE = 0.3


def cu_of(lengths: tuple[int, ...]) -> Tensor:
    cu = torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    return cu.to(torch.int32)


def reference(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], window: int | None = None
) -> Tensor:
    """Explicit softmax attention of each sequence alone, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    outputs = []
    for qs, ks, vs in zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True):
        scores = torch.einsum("ihd,jhd->hij", qs, ks) * SCALE
        pairs = torch.ones(scores.shape[-2:], dtype=torch.bool)
        unseen = pairs.triu(1) | pairs.tril(-(window or len(pairs)))
        outputs.append(
            torch.einsum("hij,jhd->ihd", scores.masked_fill(unseen, -torch.inf).softmax(-1), vs)
        )
    return torch.cat(outputs)


def random_heads(tokens: int, heads: int, seed: int, size: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, size, generator=generator)


@pytest.mark.parametrize("lengths", [(1,), (5, 5, 5), (1, 7, 7, 2, 1, 1), (64, 3), (2, 0, 3)])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("window", [None, 1, 4, 7, 100])
@pytest.mark.parametrize("block", [256, 3])
def test_forward_and_backward_equal_float64(
    lengths: tuple[int, ...],
    q_heads: int,
    kv_heads: int,
    window: int | None,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_module, "BLOCK", block)
    packing = Packing(cu_of(lengths), max(lengths))
    tokens = sum(lengths)
    inputs = [random_heads(tokens, n, i) for i, n in enumerate((q_heads, kv_heads, kv_heads))]
    mix = random_heads(tokens, q_heads, 9)
    results = []
    for function in (
        lambda q, k, v: packed_attention(q, k, v, packing, SCALE, window),
        lambda q, k, v: reference(q, k, v, lengths, window),
    ):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        (out * mix).sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    for ours, exact in zip(*results, strict=True):
        assert exact is not None
        assert (ours - exact).abs().max() < 1e-5


def test_adjacent_equal_lengths_use_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    plain = attention_module.F.scaled_dot_product_attention

    def counted(*args: Tensor, **kwargs: object) -> Tensor:
        calls.append(args[0].shape)
        assert kwargs.get("attn_mask") is None
        return plain(*args, **kwargs)

    monkeypatch.setattr(attention_module.F, "scaled_dot_product_attention", counted)
    q = random_heads(100 * 3 + 50 * 7, 2, 0)
    packing = Packing(cu_of((3,) * 100 + (7,) * 50), 7)
    packed_attention(q, q, q, packing, SCALE)
    assert packing.runs == (Run(100, 3), Run(50, 7))
    assert calls == [(100, 2, 3, 8), (50, 2, 7, 8)]


def test_inconsistent_lengths_are_rejected() -> None:
    q = random_heads(6, 2, 0)
    with pytest.raises(UsageError, match="6 packed tokens, but cu_seqlens ends at 5"):
        packed_attention(q, q, q, Packing(cu_of((2, 3)), 3), SCALE)


def test_window_attention_never_builds_a_full_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    plain = attention_module.F.scaled_dot_product_attention

    def watched(*args: Tensor, attn_mask: Tensor, **kwargs: Any) -> Tensor:
        masks.append(attn_mask.numel())
        return plain(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(attention_module.F, "scaled_dot_product_attention", watched)
    q = random_heads(5000, 1, 0)
    packed_attention(q, q, q, Packing(cu_of((5000,)), 5000), SCALE, window=300)
    assert len(masks) == -(-5000 // attention_module.BLOCK)
    assert max(masks) == attention_module.BLOCK * (attention_module.BLOCK + 299)


class FlashAttn(ModuleType):
    """A stand-in with the signature of flash-attn's function, computed by the reference."""

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        deterministic: bool,
    ) -> Tensor:
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        assert causal
        assert softmax_scale == SCALE
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        lengths = tuple(cu_seqlens_q.diff().tolist())
        assert max_seqlen_q == max_seqlen_k == max(lengths)
        left, right = window_size
        assert right == 0
        return reference(q, k, v, lengths, None if left == -1 else left + 1)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_installed_flash_attn_is_preferred(
    window: int | None, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-attn needs an option for gradients that do not depend on the order of additions."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    module = FlashAttn("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(attention, "flash_fits", lambda q: True)
    attention._has_flash_attn.cache_clear()
    lengths = (5, 1, 9)
    q, k, v = random_heads(15, 4, 0), random_heads(15, 2, 1), random_heads(15, 2, 2)
    try:
        out = packed_attention(q, k, v, Packing(cu_of(lengths), 9), SCALE, window)
    finally:
        attention._has_flash_attn.cache_clear()
    assert torch.equal(out, reference(q, k, v, lengths, window))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("release", ["2.11", "2.13"])
def test_varlen_attn_works_with_every_torch_release(
    release: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 takes shared key heads without `enable_gqa`, which 2.13 requires."""

    def of_211(
        *args: Any, return_aux: Any = None, scale: float, window_size: tuple[int, int]
    ) -> Tensor:
        q, k, v, cu, cu_k, longest, longest_k = args
        assert torch.equal(cu, cu_k)
        assert longest == longest_k == 9
        assert window_size == (-1, 0)
        assert scale == SCALE
        return reference(q, k, v, tuple(cu.diff().tolist()), None)

    def of_213(*args: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
        assert enable_gqa == (args[0].shape[1] != args[1].shape[1])
        return of_211(*args, **options)

    kernel = {"2.11": of_211, "2.13": of_213}[release]
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    monkeypatch.setattr(attention, "flash_fits", lambda q: True)
    monkeypatch.setattr(attention, "_has_flash_attn", lambda: False)
    lengths = (5, 1, 9)
    q, k, v = random_heads(15, 4, 0), random_heads(15, kv_heads, 1), random_heads(15, kv_heads, 2)
    out = packed_attention(q, k, v, Packing(cu_of(lengths), 9), SCALE)
    assert torch.equal(out, reference(q, k, v, lengths, None))


def test_flash_attention_is_not_used_on_cpus() -> None:
    assert not attention.flash_fits(torch.zeros(3, 2, 64, dtype=torch.bfloat16))  # not on a GPU


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 1, 4, 40])
def test_decoding_one_token_equals_the_last_token_of_a_sequence(
    kv_heads: int, window: int | None
) -> None:
    lengths = (5, 1, 12, 3)
    tokens = sum(lengths)
    q, k, v = random_heads(tokens, 4, 0), *(random_heads(tokens, kv_heads, i) for i in (1, 2))
    expected = reference(q, k, v, lengths, window)
    last = torch.tensor(lengths).cumsum(0) - 1
    cache = torch.full((2, 4, kv_heads, 16, 8), 1e4)
    for row, (keys, values) in enumerate(zip(k.split(lengths), v.split(lengths), strict=True)):
        cache[0, row, :, : lengths[row]] = keys.transpose(0, 1)
        cache[1, row, :, : lengths[row]] = values.transpose(0, 1)
    bias = cache_bias(torch.tensor(lengths), 16, window, q.dtype)
    out = cached_attention(q[last], cache[0], cache[1], bias, SCALE)
    assert (out - expected[last]).abs().max() < 1e-5
