"""The tensors that models of transformers have in files are those of transformers itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from slurmrl.errors import UsageError
from slurmrl.models import hf_files
from slurmrl.models.architecture import Head
from slurmrl.models.hf import as_array
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_model import HFModel
from slurmrl.models.hf_reading import read_weights
from slurmrl.models.parallel.split import Axis
from slurmrl.models.shapes import file_form
from slurmrl.tensors.checkpoint.tensors import TensorEntry, file_entries
from slurmrl.tensors.layout import Array, Box, TensorSpec
from tests.support.families import tiny

VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "image_size": 28}
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: tiny(name) for name in ("gemma2", "minimax_m2", "gpt_oss", "glm4_moe", "hrm_text")},
    **{name: tiny(name) for name in ("deepseek_v3", "qwen3_next", "qwen3_5_moe_text")},
    "longcat_flash": tiny("longcat_flash"),
    "mixtral": tiny("mixtral", num_local_experts=3),
    "qwen3_moe": tiny("qwen3_moe", num_experts=3),
    "gemma3": {
        "model_type": "gemma3",
        "text_config": tiny("gemma3_text"),
        "vision_config": {**VISION, "num_attention_heads": 2, "patch_size": 14},
        "mm_tokens_per_image": 4,
    },
    "qwen3_5": {"model_type": "qwen3_5", "text_config": tiny("qwen3_5_text")},
    "xlm-roberta": tiny("xlm-roberta", pad_token_id=1, is_decoder=True),
}


def made(values: dict[str, Any], head: Head = "lm", seed: int = 3) -> HFModel:
    config = HFConfig.from_hf(values)
    return HFModel(config, head, source=None, seed=seed, dtype=torch.float32)


def entries(model: HFModel, values: dict[str, Any], head: Head = "lm") -> list[TensorEntry]:
    """The tensors to write, which are read box by box."""
    held = dict(model.named_parameters()) | model.constants()

    def read(name: str, box: Box) -> Array:
        return as_array(held[name].detach()[box.slices])

    specs = [
        (name, TensorSpec(tuple(each.shape), str(each.dtype).removeprefix("torch.")))
        for name, each in held.items()
    ]
    return file_entries(specs, read, file_form(values, "hf", head)[1])


def saved(model: HFModel, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and tensors that transformers writes."""
    model.inner.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def assert_equal(found: list[TensorEntry], wanted: dict[str, Tensor]) -> None:
    assert {entry.name for entry in found} == wanted.keys()
    for entry in found:
        values = torch.from_numpy(np.array(entry.data()))
        assert entry.spec.shape == tuple(values.shape), entry.name
        assert torch.equal(values, wanted[entry.name]), entry.name


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_of_files_equal_transformers(tmp_path: Path, family: str) -> None:
    values = FAMILIES[family]
    model = made(values)
    config, tensors = saved(model, tmp_path)
    assert_equal(entries(model, values), tensors)
    written, _ = file_form(values, "hf", "lm")
    assert written["architectures"] == config["architectures"]
    assert written["model_type"] == config["model_type"]


def test_files_of_a_moe_critic_equal_transformers(tmp_path: Path) -> None:
    values = FAMILIES["mixtral"]
    model = made(values, "value")
    config, tensors = saved(model, tmp_path)
    assert_equal(entries(model, values, "value"), tensors)
    assert file_form(values, "hf", "value")[0]["architectures"] == config["architectures"]


def computed(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = 2 * tensors["lm_head.weight"]


def flattened(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].flatten()


def interleaved(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].view(2, 24, 32).transpose(0, 1).reshape(48, 32)


def changed_after_joining(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = torch.cat([tensors[name], tensors[name]])[:48]


def left_out(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:30]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (computed, "computes lm_head.weight"),
        (flattened, "computes lm_head.weight"),
        (interleaved, "computes model.layers.0.mlp.up_proj.weight"),
        (changed_after_joining, "computes model.layers.0.mlp.up_proj.weight"),
        (left_out, "its files lack parts of lm_head.weight"),
    ],
)
def test_family_is_rejected_if_its_files_need_more_than_slicing(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Tensor]], None], reason: str
) -> None:
    model = made(tiny("llama")).inner
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}

    def convert(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        files: dict[str, Tensor] = revert_weight_conversion(model, tensors)
        change(files)
        return files

    monkeypatch.setattr(hf_files, "revert_weight_conversion", convert)
    with pytest.raises(UsageError, match=f"cannot write the files of llama models: .*{reason}"):
        hf_files.file_slices(model, shapes)


@pytest.mark.parametrize("family", ["mixtral", "hrm_text", "qwen3_next"])
def test_weights_read_back_equal(tmp_path: Path, family: str) -> None:
    values = FAMILIES[family]
    model, other = made(values), made(values, seed=4)
    saved(model, tmp_path)
    read_weights(other, tmp_path)
    assert_equal(entries(other, values), load_file(tmp_path / "model.safetensors"))
    for name, each in other.named_parameters():
        assert torch.equal(each, model.get_parameter(name)), name


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "gemma2", "gpt_oss", "mixtral", "nemotron_h", "qwen3_5_moe_text"]
)
def test_tensor_ranks_read_their_parts_of_files(tmp_path: Path, family: str) -> None:
    """Files have one tensor for each expert, and names of their own; gemma2's matrices are tied."""
    values = tiny(family)
    saved(made(values), tmp_path)
    assert_parts_read(values, tmp_path)


def test_tensor_ranks_read_their_parts_of_files_that_are_converted(tmp_path: Path) -> None:
    """Files of the model without its head have other names; the head is the embedding."""
    values = tiny("gemma2")
    body: Any = made(values).inner.base_model
    body.save_pretrained(tmp_path)
    assert_parts_read(values, tmp_path)


def assert_parts_read(values: dict[str, Any], folder: Path) -> None:
    """Compare what two ranks read with the parts of a model with the same weights."""
    for rank in range(2):
        wanted, found = made(values), made(values, seed=4)
        for model in (wanted, found):
            model.split(Axis(rank, 2))
        read_weights(found, folder)
        for name, each in wanted.state_dict().items():
            assert torch.equal(each, found.state_dict()[name]), name


def test_written_config_states_the_transformers_defaults(tmp_path: Path) -> None:
    """A server's version of transformers may have other defaults."""
    values = tiny("qwen3_moe", rope_theta=5000.0)
    config, _ = saved(made(values), tmp_path)
    written, _ = file_form(values, "hf", "lm")
    apart = ("dtype", "transformers_version", *(name for name in config if "_token_id" in name))
    assert {name: written.get(name) for name in config if name not in apart} == {
        name: value for name, value in config.items() if name not in apart
    }
