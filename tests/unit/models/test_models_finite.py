"""Folders with NaN or infinite weights are rejected with the file and tensor."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slurmrl.engines.role_weights import initial_weights
from slurmrl.errors import UsageError
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.hf import read_values
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_model import HFModel
from slurmrl.models.model_tensors import small_not_finite
from slurmrl.models.shapes import parameter_shapes
from slurmrl.tensors.layout import Box
from tests.support.committed import CommittedTrial
from tests.unit.models.conftest import BASE, ODD, hf_model

UP = "model.layers.1.mlp.up_proj.weight"


def damage(folder: Path, name: str, *values: float) -> str:
    """Write values at the end of a stored tensor; return its file's name."""
    (file,) = (path for path in folder.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(file)
    flat = tensors[name].reshape(-1)
    flat[-len(values) :] = torch.tensor(values)
    save_file(tensors, file, {"format": "pt"})
    return file.name


def read_all(folder: Path, parts: int = 1) -> None:
    """Read a model like its ranks do, each its rows of every parameter."""
    config = ModelConfig.from_hf(read_values(folder))
    with initial_weights(config, "lm", seed=0, source=folder) as read:
        for name, shape in parameter_shapes(config, "lm").items():
            rows = -(-shape[0] // parts)
            for first in range(0, shape[0], rows):
                count = min(rows, shape[0] - first)
                read(name, Box((first, *(0 for _ in shape[1:])), (count, *shape[1:])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard", ["50GB", "8KB"])
def test_load_names_file_and_tensor_if_values_are_not_finite(
    tmp_path: Path, dtype: torch.dtype, shard: str
) -> None:
    hf_model(ODD["qwen2-tied"], 0).to(dtype).save_pretrained(tmp_path, max_shard_size=shard)
    read_all(tmp_path)
    file = damage(tmp_path, UP, float("nan"), float("-inf"), float("nan"))
    message = f"{tmp_path / file}: tensor '{UP}' has 2 NaN and 1 infinite values of 960"
    for parts in (1, 4):
        with pytest.raises(UsageError, match=re.escape(message)):
            read_all(tmp_path, parts)


@pytest.mark.parametrize(
    ("family", "stored"),
    [
        ("gpt2", "transformer.h.1.attn.c_attn.weight"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w3.weight"),
        ("qwen2-tied", "model.embed_tokens.weight"),
        ("llama-biases", "model.layers.0.self_attn.k_proj.bias"),
    ],
)
def test_load_names_the_tensor_as_stored_in_the_file(
    tmp_path: Path, family: str, stored: str
) -> None:
    hf_model(ODD[family], 0).save_pretrained(tmp_path)
    damage(tmp_path, stored, float("inf"))
    with pytest.raises(UsageError, match=f"'{stored}' has 0 NaN and 1 infinite"):
        read_all(tmp_path)


def test_float64_weights_infinite_in_float32_are_rejected(tmp_path: Path) -> None:
    hf_model(ODD["qwen2"], 0).double().save_pretrained(tmp_path)
    damage(tmp_path, UP, 1e300)
    with pytest.raises(UsageError, match="0 NaN and 1 infinite"):
        read_all(tmp_path)


def test_tied_copies_with_nan_are_rejected_for_their_nan(tmp_path: Path) -> None:
    hf_model(ODD["qwen2-tied"], 0).save_pretrained(tmp_path)
    damage(tmp_path, "model.embed_tokens.weight", float("nan"))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UsageError, match=r"'model.embed_tokens.weight' has 1 NaN"):
        read_all(tmp_path)


def test_non_finite_pinned_checkpoint_is_rejected_by_directory(tmp_path: Path) -> None:
    from slurmrl.workers.master.exporting import pin_actor

    values = {**BASE, "model_type": "llama", "eos_token_id": 3}
    config = ModelConfig.from_hf(values)
    weights = {
        name: torch.ones(shape).numpy() for name, shape in parameter_shapes(config, "lm").items()
    }
    weights[UP][0, 0] = float("nan")
    trial = CommittedTrial(tmp_path, architecture=values)
    trial.commit(4, weights)
    pinned = pin_actor(trial.paths, 4)
    with pytest.raises(UsageError, match=f"{pinned}: tensor '{UP}' has 1 NaN"):
        read_all(pinned)


@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
def test_non_finite_transformers_model_is_rejected_by_file_and_tensor(
    tmp_path: Path, family: str
) -> None:
    """transformers stacks mixtral's experts under another name."""
    hf_model(ODD[family], 0).save_pretrained(tmp_path)
    name = UP if family == "qwen2" else "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    file = damage(tmp_path, name, float("nan"))
    config = HFConfig.from_hf({**BASE, **ODD[family]})
    with pytest.raises(UsageError, match=re.escape(f"{tmp_path / file}: tensor '{name}' has 1 N")):
        HFModel(config, "lm", source=tmp_path, seed=0, dtype=torch.bfloat16)


def test_submit_checks_small_tensors_and_load_checks_large_ones(tmp_path: Path) -> None:
    hf_model(ODD["qwen2"], 0).save_pretrained(tmp_path)
    config = ModelConfig.from_hf(read_values(tmp_path))
    damage(tmp_path, UP, float("nan"))
    assert f"'{UP}' has 1 NaN" in (small_not_finite(tmp_path, config, "lm") or "")
    assert small_not_finite(tmp_path, config, "lm", limit=2000) is None
    damage(tmp_path, "model.norm.weight", *[float("nan")] * 24)
    found = small_not_finite(tmp_path, config, "lm", limit=2000)
    assert "'model.norm.weight' has 24 NaN and 0 infinite values of 24" in (found or "")
