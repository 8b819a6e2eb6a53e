"""Copies of weight moves on a GPU: interval kernels for strided boxes and moving averages."""

from __future__ import annotations

import pytest
import torch

from slurmrl.tensors.ops.native.loading import operators
from slurmrl.tensors.transfer.execute import BoxCopies
from tests.unit.transfer.test_transfer_copies import FORMS, boxes

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device on this machine"
)
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_copies_equal_torch(form: str, source: torch.dtype, target: torch.dtype) -> None:
    """The copy has every element of the box and changes no other. A moving average agrees within
    one rounding.
    """
    made = BoxCopies(GPU)
    view = boxes(source, GPU)[form]
    packed = made.packed(view, target)
    compiled = operators(GPU, 0) is not None
    assert (packed is None) == (view.is_contiguous() or not compiled)
    elements = view.to(target).contiguous()
    if packed is not None:
        assert torch.equal(packed, elements.reshape(-1))
    for eta in (1.0, 0.25):
        place = boxes(target, GPU)[form]
        whole = place.as_strided((place.untyped_storage().nbytes() // place.itemsize,), (1,), 0)
        before, expected = whole.clone(), place.double().lerp(elements.double(), eta)
        made.write(place, elements, eta)
        rounding = 1e-2 if target == torch.bfloat16 else 1e-6
        torch.testing.assert_close(place.double(), expected, rtol=rounding, atol=rounding)
        place.zero_()
        before.as_strided(place.shape, place.stride(), place.storage_offset()).zero_()
        assert torch.equal(whole, before)
