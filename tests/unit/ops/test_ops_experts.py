from __future__ import annotations

import pytest
import torch

from slurmrl.tensors.ops.products import grouped_linear


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
