"""FP8 weights of servers: their files, the commands of servers, and loading."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slurmrl.errors import EnvironmentFailure, UsageError
from slurmrl.fsio.calls import REAL
from slurmrl.models.architecture import ModelConfig
from slurmrl.rollouts.generation import fp8_weights
from slurmrl.rollouts.generation.base import WeightVersion
from slurmrl.rollouts.generation.fp8_weights import fp8_folder, quantize
from slurmrl.rollouts.generation.server_instance import Patience
from slurmrl.rollouts.generation.server_kinds import ServerKind, Serving
from slurmrl.rollouts.generation.sglang import SglangDialect, SglangServer
from slurmrl.rollouts.generation.vllm import VllmServer
from slurmrl.rollouts.generation.weight_checks import WeightChecks
from slurmrl.tensors.checkpoint.export import write_index
from tests.unit.engines.test_engines_rollout_sglang import INFO, MODEL, ScriptedServer
from tests.unit.models.conftest import BASE, ODD

CPU = torch.device("cpu")
LAYER = "model.layers.0."


def dequantized(matrix: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Multiply each element by the factor of its block, as servers do."""
    repeated = factors.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return matrix.float() * repeated[: matrix.shape[0], : matrix.shape[1]]


@pytest.mark.parametrize("shape", [(256, 384), (128, 128), (200, 130)])
def test_blocks_of_matrix_use_whole_range_of_fp8(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding errors are at most the errors of a 3-bit mantissa."""
    monkeypatch.setattr(fp8_weights, "AT_A_TIME", 128 * 200)  # several pieces
    torch.manual_seed(0)
    matrix = torch.randn(shape).to(torch.bfloat16)
    matrix[:128, :128] *= 1e-6
    matrix[128:, 128:] = 0
    values, factors = quantize(matrix, CPU)
    assert values.dtype == torch.float8_e4m3fn
    assert factors.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    assert values[:128, :128].float().abs().max() == 448
    found, wanted = dequantized(values, factors), matrix.float()
    least = factors.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    bound = torch.maximum(wanted.abs() * 2**-4, least * 2**-10)
    assert ((found - wanted).abs() <= bound * 1.001).all()
    assert (found - wanted).abs().max() > 0


def make_version(folder: Path, *, files: int = 1) -> dict[str, torch.Tensor]:
    """Write the weights of a version with a router, and return them."""
    torch.manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (64, 128),
        f"{LAYER}self_attn.q_proj.weight": (128, 128),
        f"{LAYER}self_attn.q_proj.bias": (128,),
        f"{LAYER}mlp.gate.weight": (2, 128),
        f"{LAYER}mlp.experts.1.down_proj.weight": (128, 256),
        f"{LAYER}input_layernorm.weight": (128,),
        "lm_head.weight": (64, 128),
    }
    tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    folder.mkdir()
    values = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 2}
    (folder / "config.json").write_text(json.dumps(values))
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return tensors
    places = {}
    for number, name in enumerate(tensors):
        file = f"model-{number % files}.safetensors"
        places[name] = file
    for file in set(places.values()):
        held = {name: tensors[name] for name, place in places.items() if place == file}
        save_file(held, folder / file)
    write_index(folder, places, 0, REAL)
    return tensors


@pytest.mark.parametrize("files", [1, 2])
def test_version_in_fp8_has_only_matrices_of_layers_in_fp8(tmp_path: Path, files: int) -> None:
    tensors = make_version(tmp_path / "1.1", files=files)
    with fp8_folder(tmp_path / "1.1", CPU) as made:
        found: dict[str, torch.Tensor] = {}
        for file in made.glob("*.safetensors"):
            found |= load_file(file)
        config = json.loads((made / "config.json").read_text())
        if files > 1:
            index = json.loads((made / "model.safetensors.index.json").read_text())
            assert index["weight_map"].keys() == found.keys()
    assert list(tmp_path.iterdir()) == [tmp_path / "1.1"]
    matrices = {name for name in found if found[name].dtype == torch.float8_e4m3fn}
    assert matrices == {name for name in tensors if name.endswith("_proj.weight")}
    assert found.keys() - tensors.keys() == {f"{name}_scale_inv" for name in matrices}
    for name in tensors.keys() - matrices:
        assert torch.equal(found[name], tensors[name]), name
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
    }


def test_unwritable_fp8_folder_is_failure_of_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_version(tmp_path / "1.1")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fp8_weights, "save_file", full)
    with (
        pytest.raises(EnvironmentFailure, match=r"write .*model\.safetensors.*No space left"),
        fp8_folder(tmp_path / "1.1", CPU),
    ):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / "1.1"]


def test_server_loads_fp8_files_of_a_version_and_is_not_checked(tmp_path: Path) -> None:
    """The server's parameters differ from the files of the version."""
    make_version(tmp_path / "2.1")

    class Reading(ScriptedServer):
        async def post(self, path: str, body: Any = None, *, timeout_s: float | None) -> object:
            if path == "/update_weights_from_disk":
                loaded.append(load_file(Path(body["model_path"]) / "model.safetensors"))
            return await super().post(path, body, timeout_s=timeout_s)

    loaded: list[dict[str, torch.Tensor]] = []
    server = Reading({**INFO, "weight_version": "2.1"})

    async def work() -> None:
        dialect = SglangDialect(server, model=MODEL, checks=WeightChecks(), quantizer=CPU)
        await dialect.connect()
        await dialect.pause()
        await dialect.load(WeightVersion(name="2.1", folder=tmp_path / "2.1"))

    asyncio.run(work())
    (tensors,) = loaded
    assert tensors[f"{LAYER}self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert "/weights_checker" not in server.posted


@pytest.mark.parametrize("kind", [SglangServer, VllmServer])
def test_server_starts_with_fp8_config_and_cache(tmp_path: Path, kind: type[ServerKind]) -> None:
    def made(**settings: Any) -> tuple[ServerKind, list[str]]:
        serving = Serving(
            python="/python",
            arguments=("--last", "1"),
            tokenizer=None,
            patience=Patience(),
            log=tmp_path,
            **settings,
        )
        config = ModelConfig.from_hf({**BASE, **ODD["qwen3"]})
        server = kind(config, "bfloat16", serving, tensor_ranks=1, device=CPU)
        return server, list(server.command(serving, tmp_path, tmp_path / "socket"))

    usual, command = made()
    fp8, quantized = made(quantized=True, cache_dtype="fp8_e4m3")
    assert quantized == [*command[:-2], "--kv-cache-dtype", "fp8_e4m3", *command[-2:]]
    assert "quantization_config" not in usual.model_config()
    assert fp8.model_config()["quantization_config"]["weight_block_size"] == [128, 128]


def test_gpu_without_fp8_products_is_rejected_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    message = "actor.fp8 needs GPUs of compute capability 8.9 or higher; NVIDIA A100 has 8.0"
    with pytest.raises(UsageError, match=message):
        fp8_weights.require_fp8("actor.fp8", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    fp8_weights.require_fp8("actor.fp8", torch.device("cuda"))
