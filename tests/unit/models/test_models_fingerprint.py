"""The fingerprint of frozen weights, by ranks and by an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slurmrl.config.schema import Lora
from slurmrl.engines.role_weights import Fingerprint
from slurmrl.errors import UsageError
from slurmrl.models import model_tensors
from slurmrl.models.adapters import trained_shapes
from slurmrl.models.architecture import Head, ModelConfig
from slurmrl.models.decoder import build
from slurmrl.models.model_tensors import MergedCheckpoint
from slurmrl.tensors.layout import Box, TensorSpec
from tests.support.decoder_folders import to_hf
from tests.unit.models.conftest import BASE, ODD

LORA = Lora(rank=2, targets=("q_proj",))


class Trained:
    def __init__(self, shapes: Any) -> None:
        self._shapes = shapes

    def weights(self) -> list[tuple[str, TensorSpec]]:
        return [(name, TensorSpec(shape, "float32")) for name, shape in self._shapes.items()]

    def read(self, name: str, box: Box) -> Any:
        return np.zeros(box.size, "<f4")


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen2-tied", "mixtral"])
def test_export_fingerprint_equals_the_sum_over_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str, head: Head
) -> None:
    """The fingerprint covers weights in the type of the ranks. One changed bit changes it."""
    monkeypatch.setattr(model_tensors, "BLOCK", 50)
    config = ModelConfig.from_hf({**BASE, **ODD[family]})
    decoder = build(config, "lm")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_()
    to_hf(decoder, tmp_path)
    trained = trained_shapes(config, head, LORA)
    frozen = {n: p for n, p in decoder.named_parameters() if head == "lm" or n != "lm_head.weight"}
    expected = Fingerprint({n: tuple(p.shape) for n, p in frozen.items()}, torch.device("cpu"))
    for name, parameter in frozen.items():
        values = parameter.detach().to(getattr(torch, dtype))
        for rows in (slice(0, 1), slice(1, None)):  # as two ranks
            part = values[rows]
            start = (rows.start, *(0 for _ in part.shape[1:]))
            if part.numel():
                expected.add(name, Box(start, tuple(part.shape)), part)
    found = MergedCheckpoint(Trained(trained), tmp_path, config, head, LORA)
    found.check_base(str(expected), dtype)
    with torch.no_grad():
        next(iter(frozen.values())).view(-1)[-1] *= -1
    to_hf(decoder, tmp_path)
    other = MergedCheckpoint(Trained(trained), tmp_path, config, head, LORA)
    with pytest.raises(UsageError, match=f"have changed since .* was {expected}"):
        other.check_base(str(expected), dtype)
