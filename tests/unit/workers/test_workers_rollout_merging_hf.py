"""Versions of adapters of transformers' models on the host of a rollout task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slurmrl.config.schema.roles import Lora
from slurmrl.errors import UsageError
from slurmrl.models.hf_adapters import adapter_shapes
from slurmrl.models.hf_config import HFConfig, stored
from slurmrl.models.hf_merged import MergedFolder, file_fingerprint
from slurmrl.models.hf_model import HFModel
from slurmrl.models.hf_reading import read_weights
from slurmrl.models.model_tensors import open_folder
from slurmrl.models.shapes import file_form
from slurmrl.tensors.checkpoint.export import export
from slurmrl.tensors.layout import Box
from slurmrl.workers.rollout.task_weights import MergingHost, TaskWeights
from tests.support.families import tiny, tiny_model
from tests.unit.workers.test_workers_rollout_merging import FIRST, RandomAdapters, publish_adapters

LORA = Lora(rank=3, alpha=5.0, targets="all-linear")


def adapters_of(family: str) -> RandomAdapters:
    return RandomAdapters(adapter_shapes(tiny(family), "lm", LORA), 0)


def task(folder: Path, family: str) -> TaskWeights:
    config = HFConfig.from_hf(tiny(family))
    host = MergingHost(
        folder / "base", folder / "frozen", config, "float32", LORA, torch.device("cpu")
    )
    return TaskWeights(folder / "versions", folder / "host", config.to_hf(), host)


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "nemotron_h", "gpt_oss", "deepseek_v4"])
def test_task_serves_the_same_bits_as_the_export(tmp_path: Path, family: str) -> None:
    """Also covers files with one tensor per expert, or with other names than the model."""
    tiny_model(family, tmp_path / "base")
    base, adapters = open_folder(tmp_path / "base"), adapters_of(family)
    publish_adapters(tmp_path / "versions", adapters, file_fingerprint(base), FIRST)
    version = task(tmp_path, family).newer()
    assert version is not None
    found = open_folder(version.folder)
    merged = MergedFolder(adapters, base, HFConfig.from_hf(tiny(family)), "lm", LORA.scale)
    values, _ = file_form(tiny(family), "hf", "lm")
    folder = export(merged, values, tmp_path / "merged", generation={}, storage=stored)
    expected = open_folder(folder)
    assert found.specs().keys() == expected.specs().keys()
    for name, spec in expected.specs().items():
        box = Box.whole(spec.shape)
        np.testing.assert_array_equal(found.read(name, box), expected.read(name, box))

    config = HFConfig.from_hf(tiny(family))
    options: dict[str, Any] = {"seed": 0, "dtype": torch.float32}
    model = HFModel(config, "lm", source=None, **options)
    read_weights(model, version.folder)
    for name, same in HFModel(config, "lm", source=folder, **options).state_dict().items():
        assert torch.equal(model.state_dict()[name], same), name


def test_task_rejects_versions_of_other_frozen_weights(tmp_path: Path) -> None:
    tiny_model("gpt2", tmp_path / "base")
    frozen = file_fingerprint(open_folder(tmp_path / "base"))
    tiny_model("gpt2", tmp_path / "base", seed=1)
    publish_adapters(tmp_path / "versions", adapters_of("gpt2"), frozen, FIRST)
    with pytest.raises(UsageError, match=f"here and {frozen} in weight version 1.1"):
        task(tmp_path, "gpt2").newer()
