"""Copies between boxes of storages and packed elements, by interval operators and by torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slurmrl.tensors.transfer import execute
from slurmrl.tensors.transfer.execute import BoxCopies

CPU = torch.device("cpu")


def boxes(dtype: torch.dtype, device: torch.device = CPU) -> dict[str, Tensor]:
    """Return views of separate storages, in the forms of shards."""

    def storage(*shape: int) -> Tensor:
        return torch.randn(shape).to(device, dtype)

    return {
        "columns": storage(6, 256)[:, 64:192],
        "columns of rows": storage(4, 6, 256)[1:, 2:5, 64:192],
        "rows of planes": storage(4, 6, 128)[:, 2:5],
        "one plane": storage(4, 6, 256)[2:3, :, 64:192],
        "planes apart": storage(8, 2, 128)[::4],
        "odd places": storage(6, 257)[:, 3:140],
        "whole": storage(6, 128),
        "scalar": storage(3)[1],
    }


FORMS = boxes(torch.float32)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_interval_operators_copy_the_same_elements_as_torch(
    form: str, source: torch.dtype, target: torch.dtype
) -> None:
    """They change no other element."""
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
        before, expected = whole.clone(), place.double().lerp(elements.double(), eta)
        made.write(place, elements, eta)
        rounding = 1e-2 if target == torch.bfloat16 else 1e-6
        torch.testing.assert_close(place.double(), expected, rtol=rounding, atol=rounding)
        place.zero_()
        before.as_strided(place.shape, place.stride(), place.storage_offset()).zero_()
        assert torch.equal(whole, before)


def test_layers_of_a_model_share_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    made = BoxCopies(CPU, kernels=True)
    layers = [torch.randn(6, 256) for _ in range(3)]
    packed = [made.packed(layer[:, 64:192], torch.float32) for layer in layers]
    monkeypatch.setattr(execute.Intervals, "of", None)
    for layer, elements in zip(layers, packed, strict=True):
        again = made.packed(layer[:, 64:192], torch.float32)
        assert again is not None
        assert elements is not None
        assert torch.equal(again, elements)


@pytest.mark.parametrize(
    "view",
    [torch.randn(64, 100)[:, :63], torch.randn(6, 64).T, torch.ones(4, 256).long()[:, :128]],
    ids=["short runs", "transposed", "integers"],
)
def test_torch_copies_irregular_boxes(view: Tensor) -> None:
    """Also covers boxes with short runs, whose intervals would be as large as the elements."""
    made = BoxCopies(CPU, kernels=True)
    assert made.packed(view, view.dtype) is None
    for eta in (1.0, 0.5):
        target = view.T.contiguous().T  # strided, too
        made.write(target, view, eta)
        assert torch.equal(target, view)


def test_torch_is_used_for_copies_on_cpus() -> None:
    assert BoxCopies(CPU).packed(torch.randn(6, 256)[:, 64:192], torch.float32) is None
