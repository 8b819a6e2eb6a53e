"""The fused operators, run by Triton's interpreter, equal float64 references.

Compiled and on a GPU they are tested by tests/null_gpu and tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slurmrl.tensors.ops import fused
from slurmrl.tensors.ops.elementwise import (
    ACTIVATIONS,
    gated_halves,
    gated_linear,
    gated_product,
    rotate,
)
from slurmrl.tensors.ops.logprobs import gradients, logprobs_and_entropy

with pytest.MonkeyPatch.context() as environment:
    environment.setenv("TRITON_INTERPRET", "1")  # Triton's own functions read it on import
    pytest.importorskip("triton", reason="CPU builds of torch come without Triton")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative to the largest element of a result."""


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the kernels in Triton's interpreter; the names of the operators that were called."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("SLURMRL_OPS", "native")
    names: list[str] = []

    def recorded(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            names.append(name)
            return function(*args)

        return call

    for name in ("softmax_statistics", "logit_gradient", "gated_product", "gated_gradient"):
        monkeypatch.setattr(fused, name, recorded(name, getattr(fused, name)))
    return names


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def assert_near(actual: Tensor | None, exact: Tensor | None, dtype: torch.dtype) -> None:
    assert actual is not None
    assert exact is not None
    error = (actual.double() - exact.double()).abs().max()
    assert error <= TOLERANCE[dtype] * max(1.0, exact.abs().max().item())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("tokens", "vocabulary", "chunk"), [(5, 7, 2), (3, fused.ROW_BLOCK + 5, 3), (2, 8200, 1)]
)
def test_fused_logprobs_and_gradients_equal_torch(
    tokens: int, vocabulary: int, chunk: int, dtype: torch.dtype, launched: list[str]
) -> None:
    hidden, weight = random(tokens, 6, dtype=dtype, scale=3.0), random(vocabulary, 6, dtype=dtype)
    targets = torch.arange(tokens) * (vocabulary - 1) // max(tokens - 1, 1)
    mix = random(2, tokens).double()
    results = []
    for exact in (False, True):
        h, w = (x.double() if exact else x.clone() for x in (hidden, weight))
        h.requires_grad_()
        w.requires_grad_()
        logp, entropy = logprobs_and_entropy(h, w, targets, 0.7, chunk)
        (logp * mix[0] + entropy * mix[1]).sum().backward()
        results.append((logp.detach(), entropy.detach(), h.grad, w.grad))
    assert {"softmax_statistics", "logit_gradient"} <= set(launched)
    for (actual, exact), precise in zip(
        zip(*results, strict=True), (True, True, False, False), strict=True
    ):
        assert_near(actual, exact, torch.float32 if precise else dtype)


def test_target_of_another_rank_contributes_zero() -> None:
    hidden, weight = random(4, 6), random(9, 6)
    z = hidden @ weight.t()
    normalizer = z.logsumexp(-1)
    per_token = (torch.tensor([-1, 9, 3, -9]), normalizer, random(4), random(4), random(4))
    exact = tuple(x.double() if x.is_floating_point() else x for x in per_token)
    for ours, theirs in zip(
        gradients(hidden, weight, per_token, 1.0, 4),
        gradients(hidden.double(), weight.double(), exact, 1.0, 4),
        strict=True,
    ):
        assert_near(ours, theirs, torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fused_gated_products_and_gradients_equal_torch(
    activation: str, dtype: torch.dtype, launched: list[str]
) -> None:
    inner = fused.BLOCK + 5
    tensors = [random(9, inner, dtype=dtype, scale=2.0), random(9, inner, dtype=dtype)]
    tensors.append(random(3, inner, dtype=dtype) / 16)
    mix = random(9, 1).double()
    halves = [torch.cat(tensors[:2], -1)]
    calls: list[tuple[Callable[..., Tensor], list[Tensor]]] = [
        (gated_linear, tensors),
        (gated_product, tensors[:2]),
        (gated_halves, halves),
    ]
    for call, inputs in calls:
        results = []
        for exact in (False, True):
            leaves = [x.double() if exact else x.clone() for x in inputs]
            for leaf in leaves:
                leaf.requires_grad_()
            out = call(*leaves, activation)
            (out * mix).sum().backward()
            results.append((out.detach(), *(leaf.grad for leaf in leaves)))
        for actual, exact_result in zip(*results, strict=True):
            assert_near(actual, exact_result, dtype)
    assert {"gated_product", "gated_gradient"} <= set(launched)


@pytest.mark.parametrize("shape", [(5, 3, 8), (3, 17, 96), (1, 1, 2)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_fused_rotation_and_its_gradient_equal_torch(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    angles = random(shape[0], 1, shape[2] // 2).double()
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    x, mix = random(*shape, dtype=dtype), random(*shape[::-1]).permute(2, 1, 0).double()
    results = []
    for exact in (False, True):
        leaf, c, s = (t.double() if exact else t.clone() for t in (x, cos, sin))
        leaf.requires_grad_()
        out = rotate(leaf, c, s)
        (out * mix).sum().backward()
        results.append((out.detach(), leaf.grad))
    for actual, exact_result in zip(*results, strict=True):
        assert_near(actual, exact_result, dtype)


def test_environment_variable_disables_fused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fused.fits(torch.zeros(2))
    assert not fused.fits(torch.zeros(2, dtype=torch.float64))
    assert not fused.fits(torch.zeros(0))
    monkeypatch.setenv("SLURMRL_OPS", "torch")
    assert not fused.fits(torch.zeros(2))
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("SLURMRL_OPS", "native")
    assert not fused.fits(torch.zeros(2))
