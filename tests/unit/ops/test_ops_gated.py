"""The gated feed-forward part and products with wider results, in torch's form, which is also used
where Triton does not work.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from slurmrl.errors import EnvironmentFailure
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.layer_parts import GatedMLP
from slurmrl.tensors.ops import fused
from slurmrl.tensors.ops.elementwise import ACTIVATIONS, gated_halves, gated_linear, gated_product
from slurmrl.tensors.ops.products import add_product, wide_linear, wide_product

TOKENS, INNER, HIDDEN = 11, 24, 8


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_gradients_equal_autograd(activation: str) -> None:
    inputs = [random(TOKENS, INNER), random(INNER, TOKENS).t(), random(HIDDEN, INNER)]
    mix = random(TOKENS, HIDDEN)
    value = ACTIVATIONS[activation].value
    results = []
    for exact in (False, True):
        gate, up, weight = leaves = [(x.double() if exact else x.clone()) for x in inputs]
        for leaf in leaves:
            leaf.requires_grad_()
        if exact:
            product, out = value(gate) * up, (value(gate) * up) @ weight.t()
        else:
            product = gated_product(gate, up, activation)
            halves = gated_halves(torch.cat((gate, up), -1), activation)
            torch.testing.assert_close(product, halves)
            product = 0.25 * product + 0.75 * halves
            out = gated_linear(gate, up, weight, activation)
        ((out * mix).sum() + product.square().sum()).backward()  # type: ignore[no-untyped-call]
        results.append((out.detach(), *(leaf.grad for leaf in leaves)))
    for ours, exact_result in zip(*results, strict=True):
        assert ours is not None
        assert exact_result is not None
        torch.testing.assert_close(ours.double(), exact_result, rtol=2e-6, atol=2e-5)


def test_gated_block_keeps_two_activations_of_its_inner_size() -> None:
    """It keeps neither the activated gate nor the product."""
    architecture = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    block = GatedMLP(ModelConfig.from_hf(architecture))
    kept: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape == (TOKENS, INNER):
            kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(random(TOKENS, HIDDEN))
    assert len(kept) == 2
    out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_products_are_accumulated_in_float32(dtype: torch.dtype) -> None:
    a, b = random(5, 700, dtype=dtype), random(700, 6, dtype=dtype)
    exact = a.double() @ b.double()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    product, total = wide_product(a, b), torch.ones((5, 6), dtype=wide)
    add_product(total, a, b)
    x, weight = a.clone().requires_grad_(), b.t().contiguous().requires_grad_()
    out = wide_linear(x, weight)
    for result in (product, total - 1, out.detach()):
        assert result.dtype == wide
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-4)
    out.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert weight.grad is not None
    assert x.grad.dtype == weight.grad.dtype == dtype
    expected = b.double().sum(1).expand(5, -1), a.double().sum(0).expand(6, -1)
    for gradient, exact_gradient in zip((x.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-2, atol=1e-4)


def test_torch_is_used_after_one_warning_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(fused, "kernels", fail)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    fused._failure.cache_clear()
    try:
        gate, up = random(3, 4), random(4, 3).t()
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                product = gated_product(gate, up, "gelu")
        assert torch.equal(product, torch.nn.functional.gelu(gate) * up)
        (warning,) = caplog.messages
        assert "Failed to find C compiler" in warning
        monkeypatch.setenv("SLURMRL_OPS", "native")
        with pytest.raises(EnvironmentFailure, match="cannot be used: RuntimeError: Failed to"):
            gated_product(gate, up, "gelu")
    finally:
        fused._failure.cache_clear()
