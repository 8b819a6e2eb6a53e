from __future__ import annotations

import pytest
import torch

from slurmrl.ops import products
from slurmrl.ops.products import PackedMatrix, packable


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(6, 5), (24, 40), (128, 37), (384, 256)])
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_a_packed_matrix_multiplies_like_the_matrix(
    rows: int, inputs: int, outputs: int, bias: bool
) -> None:
    """With its bias, and added to another tensor that it leaves as it is; other rows of the inputs,
    and their strides, change nothing."""
    draw = torch.Generator().manual_seed(rows)
    weight = torch.randn(outputs, inputs, generator=draw)
    added = torch.randn(outputs, generator=draw) if bias else None
    wide_rows = torch.randn(rows, 2 * inputs, generator=draw)
    x, total = wide_rows[:, :inputs], torch.randn(rows, outputs, generator=draw)
    wanted = x.double() @ weight.double().t() + (0 if added is None else added.double())
    assert packable(weight)
    packed, before = PackedMatrix(weight, added), total.clone()
    weight.zero_()  # it has a copy
    tolerance = 1e-5 * inputs**0.5
    assert (packed.product(x) - wanted).abs().max() < tolerance
    assert (packed.added(total, x) - (wanted + total.double())).abs().max() < tolerance
    assert torch.equal(total, before)


def test_without_these_operators_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise AttributeError("no such operator")

    assert not packable(torch.zeros(2, 2, dtype=torch.float64))
    assert not packable(torch.zeros(2, 2, dtype=torch.bfloat16))
    monkeypatch.setattr(products.PackedMatrix, "__init__", missing)
    monkeypatch.setattr(products, "_packs", products._packs.__wrapped__)
    assert not packable(torch.zeros(2, 2))
