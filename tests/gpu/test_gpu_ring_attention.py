"""The parts of ring attention on a GPU: torch's flash attention against matrix products."""

from __future__ import annotations

import pytest
import torch

from slurmrl.tensors.ops.partial_attention import (
    Band,
    band_attention,
    band_gradients,
    flash,
    flash_gradients,
)
from slurmrl.tensors.ops.ring_attention import seen_part

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device on this machine"
)


@pytest.mark.parametrize("window", [None, 700, 150])
@pytest.mark.parametrize("heads", [4, 8])
def test_partial_attention_equals_matrix_products(heads: int, window: int | None) -> None:
    """Queries 0 to 129 see 200 keys before them; the window hides none, some or most of them."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, grad, k, v = (
        torch.randn(tokens, heads, 64, generator=generator, device="cuda").to(torch.bfloat16)
        for tokens in (130, 130, 200, 200)
    )
    keys = 200 if window is None else min(200, window - 1)
    queries = 130 if window is None else min(130, window - 1)
    q, grad, k, v = q[:queries], grad[:queries], k[-keys:], v[-keys:]
    band, exact = Band(keys, window), [x.double().transpose(0, 1)[None] for x in (q, k, v)]
    part = seen_part(q, k, band)
    out, norms = flash(q, k, v, part, 0.2)
    wanted = band_attention(*exact, 0.2, band)
    ours = [out, norms[..., None], *flash_gradients((grad, q, out, norms), k, v, part, 0.2)]
    above = grad.double().transpose(0, 1)[None]
    right = band_gradients(above, *exact, *wanted, 0.2, band)
    for found, expected in zip(ours, (wanted[0], wanted[1][..., None], *right), strict=True):
        difference = (found.double() - expected[0].transpose(0, 1)).abs().max()
        assert difference <= 3e-2 * max(1.0, float(expected.abs().max()))
