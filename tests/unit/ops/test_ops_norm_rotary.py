from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slurmrl.tensors.ops.elementwise import rms_norm, rotate


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
