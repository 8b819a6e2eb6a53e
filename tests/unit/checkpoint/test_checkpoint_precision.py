"""Types of exported tensors: rounded like torch, and never to infinity."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import Tensor

from slurmrl.errors import CheckpointError
from slurmrl.models.hf import as_array
from slurmrl.tensors.checkpoint import export as precision_module
from slurmrl.tensors.checkpoint.export import Precision
from slurmrl.tensors.checkpoint.tensors import TensorEntry
from slurmrl.tensors.layout import TensorSpec

KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ODD = (0x3F808000, 0x3F818000, 0xBF80FFFF, 1, 0x80000000, 0x7F800000, 0xFFC00001, 0x7FFFFFFF)
"""float32 bits: ties, a carry into the exponent, a subnormal, -0, infinity, two kinds of NaN."""


def entry(values: Tensor) -> TensorEntry:
    dtype = str(values.dtype).removeprefix("torch.")
    return TensorEntry("w", TensorSpec(tuple(values.shape), dtype), lambda: as_array(values))


def numbers() -> Tensor:
    odd = torch.from_numpy(np.array(ODD, np.uint32).view(np.int32)).view(torch.float32)
    random = torch.randn(3 * 37 - len(ODD), generator=torch.Generator().manual_seed(1))
    return torch.cat([odd, random]).reshape(3, 37)


@pytest.mark.parametrize("wanted", KINDS)
@pytest.mark.parametrize("stored", KINDS)
def test_rounding_equals_torch(monkeypatch: pytest.MonkeyPatch, stored: str, wanted: str) -> None:
    monkeypatch.setattr(precision_module, "BLOCK", 7)
    source = numbers().to(KINDS[stored])
    made = Precision(wanted).apply(entry(source))
    assert made.spec == TensorSpec((3, 37), wanted)
    expected = source.to(KINDS[wanted])
    found = made.data()
    assert found.nbytes == expected.nbytes
    there = torch.from_numpy(found.view(np.int16 if wanted != "float32" else np.int32).copy())
    assert torch.equal(there.view(KINDS[wanted]).nan_to_num(nan=7), expected.nan_to_num(nan=7))


@pytest.mark.parametrize(("wanted", "value"), [("float16", 65520.0), ("bfloat16", 3.4e38)])
def test_value_that_would_become_infinite_is_an_error(wanted: str, value: float) -> None:
    made = Precision(wanted).apply(entry(torch.tensor([1.0, -value])))
    with pytest.raises(
        CheckpointError, match=re.escape(f"-{value:g}, which overflows in {wanted}")
    ):
        made.data()


def test_each_tensor_may_have_its_own_type() -> None:
    precision = Precision("float16", {"model.gate": "float32", "model.up": "bfloat16"})

    def kind(name: str, dtype: str = "float32") -> str:
        return precision.apply(
            TensorEntry(name, TensorSpec((1,), dtype), lambda: np.ones(1))
        ).spec.dtype

    assert kind("model.gate") == kind("other.model.gate") == "float32"
    assert kind("model.up") == "bfloat16"
    assert kind("model.new") == "float16"
    assert kind("model.new", "int64") == "int64"
