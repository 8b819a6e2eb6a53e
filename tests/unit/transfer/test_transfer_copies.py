"""Copies between boxes of storages and packed elements, by interval operators and by torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slurmrl.transfer import copies
from slurmrl.transfer.copies import BoxCopies

CPU = torch.device("cpu")


def boxes(dtype: torch.dtype) -> dict[str, Tensor]:
    """Views of storages of their own, in the forms that shards have."""

    def storage(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    return {
        "columns": storage(6, 64)[:, 16:48],
        "columns of rows": storage(4, 6, 64)[1:, 2:5, 16:48],
        "rows of planes": storage(4, 6, 32)[:, 2:5],
        "one plane": storage(4, 6, 64)[2:3, :, 16:48],
        "planes apart": storage(8, 2, 32)[::4],
        "whole": storage(6, 32),
        "scalar": storage(3)[1],
    }


FORMS = boxes(torch.float32)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_interval_operators_copy_what_torch_copies(
    form: str, source: torch.dtype, target: torch.dtype
) -> None:
    """Every element of the box, converted, and none beside it. A moving average equals the one
    computed in float64."""
    made = BoxCopies(CPU, kernels=True)
    view = boxes(source)[form]
    packed = made.packed(view, target)
    assert (packed is None) == view.is_contiguous()
    elements = view.to(target).contiguous()
    if packed is not None:
        assert torch.equal(packed, elements.reshape(-1))
    for eta in (1.0, 0.25):
        place = boxes(target)[form]
        whole = place.as_strided((place.untyped_storage().nbytes() // place.itemsize,), (1,), 0)
        inside = torch.zeros_like(whole, dtype=torch.bool)
        inside.as_strided(place.shape, place.stride(), place.storage_offset()).fill_(True)
        before, expected = whole.clone(), place.double().lerp(elements.double(), eta)
        made.write(place, elements, eta)
        rounding = 1e-2 if target == torch.bfloat16 else 1e-6
        torch.testing.assert_close(place.double(), expected, rtol=rounding, atol=rounding)
        assert torch.equal(whole[~inside], before[~inside])


def test_the_layers_of_a_model_share_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    made = BoxCopies(CPU, kernels=True)
    layers = [torch.randn(6, 64) for _ in range(3)]
    packed = [made.packed(layer[:, 16:48], torch.float32) for layer in layers]
    monkeypatch.setattr(copies.Intervals, "of", None)
    for layer, elements in zip(layers, packed, strict=True):
        again = made.packed(layer[:, 16:48], torch.float32)
        assert again is not None
        assert elements is not None
        assert torch.equal(again, elements)


@pytest.mark.parametrize(
    "view", [torch.randn(64, 6)[:, :3], torch.randn(6, 64).T], ids=["short runs", "transposed"]
)
def test_torch_copies_boxes_of_scattered_elements(view: Tensor) -> None:
    """Their intervals would be as large as the elements."""
    made = BoxCopies(CPU, kernels=True)
    assert made.packed(view, torch.float32) is None
    target = torch.zeros_like(view)
    made.write(target, view, 1.0)
    assert torch.equal(target, view)


def test_torch_copies_on_cpus() -> None:
    assert BoxCopies(CPU).packed(torch.randn(6, 64)[:, 16:48], torch.float32) is None
