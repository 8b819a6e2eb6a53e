"""The compiled passes over rows on CPUs: norms, gated products, rotations, and attention that turns
its heads and writes to the cache. The torch forms, in float64, are the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from slurmrl.tensors.ops import elementwise
from slurmrl.tensors.ops.elementwise import (
    gated_halves,
    gated_linear,
    gated_product,
    rms_norm,
    rotate,
)
from slurmrl.tensors.ops.paged_kernels import attend_heads

SIZES = (1, 15, 16, 17, 130)
"""Elements of a row: below, at and beside the 16 that are computed together."""
TOKENS = (0, 1, 600)
"""The gradient of a norm's weight is summed over blocks of 256 rows."""


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def results(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return the result of a function, and the gradients of its inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(numbers(*out.shape, seed=9).to(out.dtype))  # type: ignore[no-untyped-call]
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def angles(tokens: int, size: int) -> tuple[Tensor, Tensor]:
    theta = numbers(tokens, 1, size // 2)
    cos, sin = theta.cos(), theta.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def cases() -> Iterator[tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]]:
    for tokens in TOKENS:
        for size in SIZES:
            x, gate = numbers(tokens, size), 8 * numbers(tokens, size, seed=1)
            up = numbers(tokens, size, seed=2)
            for offset in (0.0, 1.0):

                def norm(x: Tensor, weight: Tensor, offset: float = offset) -> Tensor:
                    return rms_norm(x, weight, 1e-3, offset)

                yield f"norm {tokens} {size} {offset}", norm, (x, numbers(size))
            yield f"product {tokens} {size}", lambda a, b: gated_product(a, b, "silu"), (gate, up)
            halves = torch.cat((gate, up), -1)
            yield f"halves {tokens} {size}", lambda x: gated_halves(x, "silu"), (halves,)
            weight = numbers(3, size)
            yield (
                f"linear {tokens} {size}",
                lambda a, b, w: gated_linear(a, b, w, "silu"),
                (gate, up, weight),
            )
        for size in (2, 30, 32, 36, 128):
            cos, sin = angles(tokens, size)

            def turn(x: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
                return rotate(x[:, 1:], cos.to(x.dtype), sin.to(x.dtype))  # heads beside others

            yield f"rotation {tokens} {size}", turn, (numbers(tokens, 3, size),)


def test_row_operators_equal_torch_in_float64() -> None:
    assert elementwise.cpu_fits(torch.ones(1))
    for name, function, inputs in cases():
        found = results(function, *inputs)
        exact = results(function, *(x.double() for x in inputs))
        for ours, expected in zip(found, exact, strict=True):
            largest = float(expected.abs().max()) if expected.numel() else 0.0
            atol = 5e-5 + 1e-6 * largest
            assert torch.allclose(ours.double(), expected, rtol=1e-5, atol=atol), name


def test_row_result_depends_only_on_its_row() -> None:
    x, weight, size = numbers(600, 130), numbers(130), 64
    gate, up, heads = numbers(600, 130), numbers(600, 130, seed=1), numbers(600, 2, size)
    cos, sin = angles(600, size)
    normed, turned = rms_norm(x, weight, 1e-5), rotate(heads, cos, sin)
    product = gated_product(gate, up, "silu")
    for row in (0, 255, 599):
        own = slice(row, row + 1)
        assert torch.equal(rms_norm(x[own], weight, 1e-5), normed[own])
        assert torch.equal(gated_product(gate[own], up[own], "silu"), product[own])
        assert torch.equal(rotate(heads[own], cos[own], sin[own]), turned[own])

    def gradients() -> list[Tensor]:
        return results(lambda x, w: rms_norm(x, w, 1e-5), numbers(4000, 130), weight)

    threads, one = torch.get_num_threads(), gradients()
    try:
        torch.set_num_threads(3)
        several = gradients()
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, one, several))


def test_gate_is_accurate_for_any_magnitude() -> None:
    gate = torch.tensor([[-1e30, -100.0, -87.5, -1e-30, 0.0, 1e-30, 87.5, 100.0, 1e30]])
    product, gradients = elementwise.cpu_gated_gradient(
        gate, torch.ones_like(gate), torch.ones_like(gate)
    )
    exact = gate.double().requires_grad_()
    value = torch.nn.functional.silu(exact)
    value.sum().backward()  # type: ignore[no-untyped-call]
    assert exact.grad is not None
    assert torch.allclose(product.double(), value.detach(), rtol=1e-6, atol=1e-30)
    assert torch.allclose(gradients[:, :9].double(), exact.grad, rtol=1e-6, atol=1e-6)
    assert gated_product(torch.full((1, 1), float("nan")), torch.ones(1, 1), "silu").isnan().all()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("size", [30, 32])
def test_fused_attention_rotates_heads_and_writes_the_cache(
    size: int, turned: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, kv_heads, page = 7, 2, 4
    heads = numbers(tokens, 6 + 2 * kv_heads, size)
    tables = torch.randperm(12, generator=torch.Generator().manual_seed(5)).view(4, 3)
    row = torch.tensor([0, 1, 1, 2, 3, 3, 3])
    lengths = torch.tensor([12, 6, 7, 1, 3, 4, 5])
    slots = tables[row, (lengths - 1) // page] * page + (lengths - 1) % page
    kept = [numbers(12 * page + 1, kv_heads, size, seed=seed) for seed in (1, 2)]
    found = []
    for choice in ("native", "torch"):
        monkeypatch.setenv("SLURMRL_OPS", choice)
        keys, values = (cells.clone() for cells in kept)
        out = attend_heads(
            heads,
            angles(tokens, size) if turned else None,
            *(keys, values, slots, tables, row, lengths),
            page=page,
            longest=12,
            scale=0.3,
            window=window,
        )
        found.append((out, keys, values))
    for ours, expected in zip(*found, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(found[0][2], found[1][2])
