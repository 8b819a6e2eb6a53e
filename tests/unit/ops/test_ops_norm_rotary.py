"""Norms, rotations, experts and low-rank products against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slurmrl.tensors.ops.elementwise import rms_norm, rotate
from slurmrl.tensors.ops.products import Dropout, grouped_linear, low_rank_linear


@pytest.mark.parametrize("shape", [(7, 16), (5, 3, 8), (0, 16), (1, 1, 2)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_equals_float64(shape: tuple[int, ...], offset: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, mix = (torch.randn(shape, generator=generator) for _ in range(2))
    weight = torch.randn(shape[-1], generator=generator)
    results = []
    for exact in (False, True):
        a, w = (t.double() if exact else t.clone() for t in (x, weight))
        a.requires_grad_()
        w.requires_grad_()
        if exact:
            out = a / (a.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (w + offset)
        else:
            out = rms_norm(a, w, 1e-5, offset)
        (out * mix).sum().backward()
        results.append((out.detach(), a.grad, w.grad))
    for ours, expected in zip(*results, strict=True):
        assert ours is not None
        assert expected is not None
        assert torch.allclose(ours.double(), expected, atol=2e-6, rtol=1e-5)


def test_norm_keeps_half_precision_and_accumulates_in_float32() -> None:
    x = torch.full((2, 4096), 300.0, dtype=torch.bfloat16)  # squares sum to far above 2^16
    out = rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), 1e-6)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.ones_like(out))


def test_small_norm_weight_next_to_an_offset_is_not_rounded_away() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 64, generator=generator).bfloat16()
    weight = (torch.randn(64, generator=generator) * 0.01).bfloat16()
    wide = x.double()
    normed = wide / wide.square().mean(-1, keepdim=True).sqrt()
    exact = (normed * (1 + weight.double())).bfloat16()
    assert (rms_norm(x, weight, 0.0, 1.0) == exact).float().mean() > 0.98
    assert (rms_norm(x, 1 + weight, 0.0) == exact).float().mean() < 0.8


def angles(tokens: int, pairs: int) -> Tensor:
    return torch.rand(tokens, 1, pairs, generator=torch.Generator().manual_seed(3)) * 6


def test_rotation_equals_complex_multiplication() -> None:
    x = torch.randn(6, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x.requires_grad_()
    theta = angles(6, 4).double()
    cos, sin = theta.cos(), theta.sin()
    out = rotate(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(theta), theta)
    assert torch.allclose(out, torch.cat((turned.real, turned.imag), -1))
    mix = torch.randn(6, 3, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (ours,) = torch.autograd.grad((out * mix).sum(), x, retain_graph=True)
    exact = torch.cat((turned.real, turned.imag), -1)
    (expected,) = torch.autograd.grad((exact * mix).sum(), x)
    assert torch.allclose(ours, expected)


@pytest.mark.parametrize("counts", [(3, 0, 2), (0, 0, 7), (1, 1, 1), (0, 0, 0)])
@pytest.mark.parametrize(
    ("inputs", "outputs", "dtype"),
    [(8, 12, torch.float32), (5, 7, torch.float32), (8, 12, torch.float64)],
    ids=["kernel", "loop", "no kernel"],
)
def test_each_token_is_multiplied_with_its_experts_matrix(
    counts: tuple[int, ...], inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = sum(counts)
    x = torch.randn(tokens, inputs, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, outputs, inputs, generator=generator, dtype=dtype, requires_grad=True)
    mix = torch.randn(tokens, outputs, generator=generator, dtype=dtype)
    out = grouped_linear(x, weight, torch.tensor(counts))
    (out * mix).sum().backward()
    expert = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    wide, matrices = (t.detach().double().requires_grad_() for t in (x, weight))
    exact = torch.einsum("ti,toi->to", wide, matrices[expert])
    (exact * mix).sum().backward()
    for ours, expected in ((out, exact), (x.grad, wide.grad), (weight.grad, matrices.grad)):
        assert ours is not None
        assert expected is not None
        assert torch.allclose(ours.double(), expected, atol=1e-5)


def drawn(tokens: int, first: int = 0, rate: float = 0.3) -> Dropout:
    keys = torch.arange(tokens) * 977 + 3
    return Dropout(keys, salt=5, rate=rate, first=first)


def test_low_rank_gradients_equal_plain_products() -> None:
    """Also covers finite differences, and dropout, whose mask the backward pass recomputes."""
    generator = torch.Generator().manual_seed(0)
    x, a, b = (
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((7, 10), (3, 10), (6, 3))
    )
    dropout = drawn(7)
    mask = dropout(torch.ones(7, 10, dtype=torch.float64))
    assert 0 < int((mask == 0).sum()) < mask.numel()
    for use, plain in ((None, x), (dropout, x * mask)):
        expected = 0.7 * (plain @ a.t() @ b.t())
        torch.testing.assert_close(low_rank_linear(x, a, b, 0.7, use), expected)
        assert torch.autograd.gradcheck(low_rank_linear, (x, a, b, 0.7, use))


def test_dropout_drops_at_its_rate_and_keeps_the_mean() -> None:
    found = drawn(4000)(torch.ones(4000, 50))
    assert abs(float((found == 0).float().mean()) - 0.3) < 0.005
    assert abs(float(found.mean()) - 1.0) < 0.01
    assert found.unique().tolist() == [0.0, float(torch.tensor(65536 / (65536 - 19661)))]


def test_dropout_depends_only_on_token_and_column() -> None:
    whole = drawn(9)(torch.ones(9, 30))
    for begin, end in ((0, 7), (5, 14), (14, 30)):
        part = drawn(9, first=begin)(torch.ones(9, end - begin))
        assert torch.equal(part, whole[:, begin:end])
    order = torch.tensor([4, 0, 8])
    some = Dropout(drawn(9).keys[order], salt=5, rate=0.3)(torch.ones(3, 30))
    assert torch.equal(some, whole[order])
    other = Dropout(drawn(9).keys, salt=6, rate=0.3)(torch.ones(9, 30))
    assert not torch.equal(other, whole)
