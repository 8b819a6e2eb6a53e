"""The fused operators and float32 products on a real GPU, against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slurmrl.tensors.ops.elementwise import ACTIVATIONS, gated_linear, rms_norm, rotate
from slurmrl.tensors.ops.logprobs import logprobs_and_entropy
from slurmrl.tensors.ops.products import wide_linear

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device on this machine"
)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Relative to the largest element of a result."""
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE)
Function = Callable[..., tuple[Tensor, ...]]


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an operator that cannot run an error, instead of a fallback to torch."""
    monkeypatch.setenv("SLURMRL_OPS", "native")
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def check(function: Function, inputs: list[Tensor], dtype: torch.dtype) -> None:
    """Results and gradients on the card equal those of float64 on the CPU."""
    runs = []
    for device, kind in (("cuda", dtype), ("cpu", torch.float64)):
        leaves = [x.to(dtype).to(device, kind, copy=True).requires_grad_() for x in inputs]
        outputs = function(*leaves)
        mixed = [(out.double() * random(*out.shape, seed=9).to(device)).sum() for out in outputs]
        torch.stack(mixed).sum().backward()  # type: ignore[no-untyped-call]
        runs.append([*outputs, *(leaf.grad for leaf in leaves)])
    for ours, exact in zip(*runs, strict=True):
        assert ours is not None
        assert exact is not None
        assert ours.shape == exact.shape
        if exact.numel():
            error = (ours.detach().cpu().double() - exact.detach()).abs().max()
            assert error <= TOLERANCE[dtype] * max(1.0, exact.abs().max().item())


@DTYPES
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 5), (300, 4101), (1500, 32_000)])
def test_fused_logprobs_equal_torch(tokens: int, vocabulary: int, dtype: torch.dtype) -> None:
    targets = torch.arange(tokens) * 7 % vocabulary

    def function(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return logprobs_and_entropy(hidden, weight, targets.to(hidden.device), 0.7)

    check(function, [random(tokens, 64), 0.3 * random(vocabulary, 64)], dtype)


@DTYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fused_gated_products_equal_torch(activation: str, dtype: torch.dtype) -> None:
    check(
        lambda gate, up, weight: (gated_linear(gate, up, weight, activation),),
        [2.0 * random(700, 333), random(700, 333, seed=1), random(16, 333) / 18],
        dtype,
    )


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 2), (700, 28, 128), (33, 5, 96)])
def test_fused_rotations_equal_torch(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    angles = random(shape[0], 1, shape[2] // 2)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        cos, sin = angles.cos().to(dtype).to(x), angles.sin().to(dtype).to(x)
        return (rotate(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)),)

    check(function, [random(*shape)], dtype)


@DTYPES
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(700, 3584), (100, 4, 128), (0, 16)])
def test_fused_norms_equal_torch(shape: tuple[int, ...], offset: float, dtype: torch.dtype) -> None:
    check(
        lambda x, weight: (rms_norm(x, weight, 1e-6, offset),),
        [random(*shape), random(shape[-1])],
        dtype,
    )


@DTYPES
def test_values_are_summed_in_float32(dtype: torch.dtype) -> None:
    x, weight = random(500, 3584).to("cuda", dtype), random(1, 3584).to("cuda", dtype)
    exact = x.double() @ weight.double().t()
    assert (wide_linear(x, weight) - exact).abs().max() < 1e-3
