from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slurmrl.tensors.ops import products
from slurmrl.tensors.ops.products import PackedMatrix, add_product, linear, packable, product


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(0, 3), (6, 5), (24, 40), (128, 37), (384, 256)])
@pytest.mark.parametrize("rows", [0, 1, 2, 13, 133])
def test_packed_matrix_multiplies_like_the_original(
    rows: int, inputs: int, outputs: int, bias: bool
) -> None:
    """Strides, other rows and threads change no bit."""
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


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let oneDNN compute products of all sizes on all CPUs."""
    monkeypatch.setattr(products, "WIDE_PRODUCT", 0)
    monkeypatch.setattr(products, "ROWS_PER_SUM", 7)
    monkeypatch.setattr(products, "_half_width", lambda: True)


class Weights(TorchDispatchMode):
    """Count oneDNN's products, and check that no weight has gaps."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.count += 1
            assert args[1].is_contiguous() or args[1].t().is_contiguous(), args[1].stride()
        return func(*args, **(kwargs or {}))


def layouts(rows: int, columns: int) -> list[Tensor]:
    """Return random matrices by rows and by columns, without and with gaps."""
    values = torch.randn(4, rows, 2 * columns)
    by_columns = torch.randn(2, 2 * columns, rows)
    return [
        values[0, :, :columns].clone(),
        values[1, :, :columns],
        by_columns[0, :columns].t(),
        torch.randn(columns, 2 * rows)[:, :rows].t(),
    ]


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize(("rows", "inner", "columns"), [(5, 9, 30), (40, 6, 8), (1, 16, 3)])
def test_products_by_onednn_are_right_for_all_layouts(rows: int, inner: int, columns: int) -> None:
    with Weights() as calls:
        for a in layouts(rows, inner):
            for b in layouts(inner, columns):
                wanted = (a.double() @ b.double()).float()
                torch.testing.assert_close(product(a, b), wanted, rtol=0, atol=1e-5)
                out = torch.empty(2 * rows, columns)[:rows]
                assert product(a, b, out=out) is out
                torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)
                total = torch.ones(rows, columns)
                add_product(total, a, b)
                torch.testing.assert_close(total, wanted + 1, rtol=0, atol=1e-5)
    assert calls.count >= 48


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("shape", [(7, 12), (2, 3, 12)])
def test_linear_by_onednn_has_the_gradients_of_torch(
    shape: tuple[int, ...], frozen: bool, bias: bool
) -> None:
    x = torch.randn(shape, requires_grad=True)
    weight = torch.randn(10, 12, requires_grad=not frozen)
    added = torch.randn(10, requires_grad=True) if bias else None
    leaves = [one for one in (x, weight, added) if one is not None and one.requires_grad]
    wanted = torch.nn.functional.linear(x, weight, added)
    with Weights() as calls:
        found = linear(x, weight, added)
        grad = torch.randn_like(found).mT.contiguous().mT  # by columns
        gradients = torch.autograd.grad(found, leaves, grad)
    assert calls.count == (2 if frozen else 3)
    torch.testing.assert_close(found, wanted)
    for mine, reference in zip(gradients, torch.autograd.grad(wanted, leaves, grad), strict=True):
        torch.testing.assert_close(mine, reference)
    with torch.no_grad():
        assert torch.equal(linear(x, weight, added), found)


@pytest.mark.usefixtures("onednn")
def test_linear_by_onednn_keeps_no_input_for_a_frozen_weight() -> None:
    """A model with adapters does not keep the inputs of its other layers."""
    x, weight = torch.randn(7, 12, requires_grad=True), torch.randn(10, 12)
    kept: list[tuple[int, ...]] = []

    def keep(values: Tensor) -> Tensor:
        kept.append(tuple(values.shape))
        return values

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda values: values):
        linear(x, weight)
    assert kept == [(10, 12)]


def test_small_and_half_precision_products_are_left_to_torch() -> None:
    with Weights() as calls:
        product(torch.ones(8, 8), torch.ones(8, 8))
        product(torch.ones(512, 512).bfloat16(), torch.ones(512, 512).bfloat16())
    assert not calls.count
