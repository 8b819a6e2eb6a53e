from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slurmrl.tensors.ops.logprobs import (
    following_tokens,
    logprobs_and_entropy,
    packed_logprobs_and_entropy,
)
from tests.support.largest_tensor import LargestTensor

TOKENS, HIDDEN, VOCABULARY = 50, 12, 31


def random_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    return hidden, weight, torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logq = (hidden @ weight.T / temperature).log_softmax(-1)
    return logq.gather(-1, targets[:, None]).squeeze(-1), -(logq.exp() * logq).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [None, 1, 7, 50, 1000])
@pytest.mark.parametrize("parts", [(1.0, 0.0), (0.0, 1.0), (0.7, -1.3)])
def test_logprobs_and_gradients_equal_float64(
    temperature: float, chunk: int | None, parts: tuple[float, float]
) -> None:
    hidden, weight, targets = random_inputs()
    mix = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(1))
    results = []
    for exact in (False, True):
        h, w = (x.double() if exact else x.clone() for x in (hidden, weight))
        h.requires_grad_()
        w.requires_grad_()
        if exact:
            logp, entropy = reference(h, w, targets, temperature)
        else:
            logp, entropy = logprobs_and_entropy(h, w, targets, temperature, chunk)
        (parts[0] * (logp * mix[0]).sum() + parts[1] * (entropy * mix[1]).sum()).backward()
        results.append((logp.detach(), entropy.detach(), h.grad, w.grad))
    for ours, expected in zip(*results, strict=True):
        assert ours is not None
        assert expected is not None
        assert (ours - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


def test_gradient_may_be_taken_for_one_input() -> None:
    hidden, weight, targets = random_inputs()
    hidden.requires_grad_()
    logprobs_and_entropy(hidden, weight, targets)[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
    frozen = hidden.detach()
    weight.requires_grad_()
    logprobs_and_entropy(frozen, weight, targets)[0].sum().backward()
    assert weight.grad is not None


def test_logits_of_bfloat16_inputs_are_float32() -> None:
    """Only the sums of exact products are rounded, to float32. Gradients have the inputs' dtype."""
    hidden, weight, targets = random_inputs(torch.bfloat16)
    hidden.requires_grad_()
    logp, entropy = logprobs_and_entropy(hidden, weight, targets)
    assert logp.dtype == entropy.dtype == torch.float32
    logp.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    for ours, exact in zip(
        (logp, entropy), reference(hidden.double(), weight.double(), targets, 1.0), strict=True
    ):
        assert (ours - exact).abs().max() < 1e-5


def test_full_logits_are_never_kept() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(400, 4, generator=generator, requires_grad=True)
    weight = torch.randn(90, 4, generator=generator, requires_grad=True)
    targets = torch.randint(0, 90, (400,), generator=generator)
    with LargestTensor() as largest:
        logp, entropy = logprobs_and_entropy(hidden, weight, targets, chunk=10)
        (logp + entropy).sum().backward()
    assert largest.elements <= 400 * 4


class LogitsAtProducts(TorchDispatchMode):
    """Most tensors of one shape that were alive when a product of that shape began."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.most, self.products = 0, 0
        self._shape, self._made = shape, set[weakref.ref[torch.UntypedStorage]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        alive = len({id(ref()) for ref in self._made if ref() is not None})
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.shape == self._shape:
            self._made.add(weakref.ref(out.untyped_storage()))
            if func is torch.ops.aten.mm.default:
                self.products += 1
                self.most = max(self.most, alive)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_chunk_are_freed_before_the_next_chunk(dtype: torch.dtype) -> None:
    hidden, weight, targets = random_inputs(dtype)
    inputs = (hidden.requires_grad_(), weight.requires_grad_())
    with LogitsAtProducts((10, VOCABULARY)) as seen:
        logp, entropy = logprobs_and_entropy(*inputs, targets, chunk=10)
        (logp + entropy).sum().backward()
    assert seen.products == 2 * TOKENS // 10
    assert seen.most == 0


def test_packed_results_are_aligned_with_tokens() -> None:
    hidden, weight, ids = random_inputs()
    cu = torch.tensor([0, 1, 8, 8, 30, 50], dtype=torch.int32)
    logp, entropy = packed_logprobs_and_entropy(hidden, weight, ids, cu, 0.9)
    logq = (hidden @ weight.T / 0.9).log_softmax(-1)
    for start, stop in ((0, 1), (1, 8), (8, 30), (30, 50)):
        assert logp[start] == entropy[start] == 0
        for t in range(start + 1, stop):
            assert abs(logp[t] - logq[t - 1, ids[t]]) < 1e-5
            assert abs(entropy[t] + (logq[t - 1].exp() * logq[t - 1]).sum()) < 1e-5


def test_following_tokens_skip_empty_sequences() -> None:
    cu = torch.tensor([0, 0, 2, 2, 3, 6, 6], dtype=torch.int32)
    assert following_tokens(cu).tolist() == [1, 4, 5]
