from __future__ import annotations

import pytest
import torch

from slurmrl.tensors.ops.products import PackedMatrix, packable


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(0, 3), (6, 5), (24, 40), (128, 37), (384, 256)])
@pytest.mark.parametrize("rows", [0, 1, 2, 13, 133])
def test_packed_matrix_multiplies_like_the_original(
    rows: int, inputs: int, outputs: int, bias: bool
) -> None:
    """With its bias, and added to another tensor that it leaves as it is.

    Strides of the inputs, other rows and threads change no bit.
    """
    draw = torch.Generator().manual_seed(rows)
    weight = torch.randn(outputs, inputs, generator=draw)
    added = torch.randn(outputs, generator=draw) if bias else None
    wide_rows = torch.randn(rows, 2 * inputs, generator=draw)
    x, total = wide_rows[:, :inputs], torch.randn(rows, outputs, generator=draw)
    wanted = x.double() @ weight.double().t() + (0 if added is None else added.double())
    assert packable(weight)
    packed, before = PackedMatrix.of(weight, added), total.clone()
    weight.zero_()  # it has a copy
    tolerance = 1e-5 * max(inputs, 1) ** 0.5
    made = packed.product(x)
    torch.testing.assert_close(made.double(), wanted, rtol=0, atol=tolerance)
    sums = packed.added(total, x)
    torch.testing.assert_close(sums.double(), wanted + total.double(), rtol=0, atol=tolerance)
    assert torch.equal(total, before)
    for row in range(rows):
        assert torch.equal(packed.product(x[row : row + 1].clone())[0], made[row])
    torch.set_num_threads(3)
    try:
        assert torch.equal(packed.product(x), made)
    finally:
        torch.set_num_threads(1)


def test_matrices_without_compiled_multiplication_are_not_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not packable(torch.zeros(2, 2, dtype=torch.float64))
    assert not packable(torch.zeros(2, 2, dtype=torch.bfloat16))
    monkeypatch.setenv("SLURMRL_OPS", "torch")
    assert not packable(torch.zeros(2, 2))
