"""Every family on the fsdp engine, and transformers' models in place of the built-in decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slurmrl.engines.role_weights import init_tensor
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.decoder import Decoder, build
from slurmrl.rollouts.generation.base import GenerationOptions
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from tests.distributed.engines.cases import ARCHITECTURE, Setup, batch, model
from tests.distributed.engines.exported import train_and_export
from tests.distributed.engines.one_process import assert_as_one_process
from tests.pool import RankPool
from tests.support.decoder_folders import from_hf, to_hf
from tests.support.families import tiny

HERE = "tests.distributed.engines.cases"
SPLIT = [[1, 5], [0, 2, 3, 4, 6, 7, 8, 9]]
WINDOWED = {**ARCHITECTURE, "model_type": "mistral", "sliding_window": 4}
MOE = {
    **ARCHITECTURE,
    "model_type": "qwen3_moe",
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 14,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": WINDOWED,
    "gemma": {**ARCHITECTURE, "model_type": "gemma"},
    "mixtral": {**ARCHITECTURE, "model_type": "mixtral", "num_local_experts": 3},
    "qwen3_moe": MOE,
    "glm4_moe": {
        **ARCHITECTURE,
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 14,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "head_dim": 8,
    },
    "deepseek_v3": {
        **ARCHITECTURE,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "head_dim": 4,
        "q_lora_rank": 7,
        "kv_lora_rank": 9,
        "qk_nope_head_dim": 5,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 14,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        **ARCHITECTURE,
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 14,
        "sliding_window": 4,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 33,
        "n_embd": 20,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 40,
        "initializer_range": 0.2,
    },
}
SCALES = {"mixtral": 0.135, "qwen3_moe": 0.12}
"""Of weights so small that rounding is not magnified, and that leave every router a margin; 0.1 of
families without."""
UNITS = {"root": {}, "layers": {"small_bytes": 0}}


def plain_decoder(architecture: dict[str, Any]) -> Decoder:
    config = ModelConfig.from_hf(architecture)
    decoder = build(config)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            p.copy_(init_tensor(name, tuple(p.shape), config, seed=7))
    return decoder


@pytest.mark.parametrize(
    ("family", "units"),
    [
        ("mistral", "root"),
        ("gemma", "layers"),
        ("mixtral", "root"),
        ("qwen3_moe", "layers"),
        ("glm4_moe", "layers"),
        ("deepseek_v3", "layers"),
        ("gpt_oss", "layers"),
        ("gpt2", "layers"),
    ],
)
def test_gradients_of_every_family_equal_one_process(
    ranks: RankPool, tmp_path: Path, family: str, units: str
) -> None:
    architecture = {**FAMILIES[family], "initializer_range": SCALES.get(family, 0.1)}
    settings = model(architecture=architecture, max_tokens_per_microbatch=16)
    setup = Setup(model=settings, options=UNITS[units], split=SPLIT)
    assert_as_one_process(ranks, tmp_path, setup, architecture)


@pytest.mark.parametrize("implementation", ["builtin", "hf"])
def test_weight_decay_changes_no_bias_of_experts(ranks: RankPool, implementation: str) -> None:
    settings = model(architecture=FAMILIES["gpt_oss"], implementation=implementation)
    (found,) = ranks(1, "tests.distributed.engines.layout_cases:decaying", Setup(model=settings))
    last = {name.rpartition(".")[2] for name in found}
    assert last == {"weight", "gate_up_proj", "down_proj"}


@pytest.mark.parametrize(
    "family", ["gemma", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss", "gpt2"]
)
def test_export_equals_the_files_written_by_the_decoder(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    setup = Setup(model=model(architecture=FAMILIES[family]), split=SPLIT)
    folder, _ = train_and_export(ranks, setup, tmp_path, "builtin")
    (tmp_path / "again").mkdir()
    to_hf(from_hf(folder), tmp_path / "again")
    name = "model.safetensors"
    assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize(
    ("mode", "units", "dtype"),
    [
        ("selective", "root", "float32"),
        ("selective", "layers", "bfloat16"),
        ("full", "layers", "float32"),
    ],
)
def test_recomputation_changes_no_result(
    ranks: RankPool, tmp_path: Path, mode: str, units: str, dtype: str
) -> None:
    found = []
    for checkpointing in (False, mode):
        settings = model(architecture=MOE, gradient_checkpointing=checkpointing, dtype=dtype)
        setup = Setup(model=settings, options=UNITS[units], split=SPLIT)
        folder = tmp_path / str(checkpointing)
        folder.mkdir()
        ranks(2, f"{HERE}:train", setup, save=folder)
        saved = RoleCheckpoint(folder, "actor")
        found.append({name: saved.read(f"exp_avg/{name}") for name, _ in saved.weights()})
    for name, plain in found[0].items():
        assert (plain == found[1][name]).all(), name


@pytest.mark.parametrize(("units", "mode"), [("root", "off"), ("layers", "full")])
def test_transformers_model_trains_like_the_built_in_model(
    ranks: RankPool, tmp_path: Path, units: str, mode: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    to_hf(plain_decoder(WINDOWED), source)
    stats = {}
    for implementation in ("builtin", "hf"):
        settings = model(
            implementation=implementation,
            gradient_checkpointing=mode,
            max_tokens_per_microbatch=16,
        )
        setup = Setup(model=settings, options=UNITS[units], split=SPLIT, source=source)
        folder = tmp_path / implementation
        folder.mkdir()
        results = ranks(2, f"{HERE}:train", setup, range(3), save=folder)
        stats[implementation] = results[0][0]
    for ours, theirs in zip(stats["builtin"], stats["hf"], strict=True):
        assert theirs == pytest.approx(ours, rel=1e-4)
    saved = [RoleCheckpoint(tmp_path / name, "actor") for name in stats]
    for name, _ in saved[0].weights():
        ours, theirs = saved[0].read(name), saved[1].read(f"inner.{name}")
        assert abs(ours - theirs).max() < 1e-4, name


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "mamba", "biogpt", "zamba2"])
def test_sharded_transformers_blocks_have_the_gradients_of_one_rank(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    """Also covers nested, shared and unnamed blocks, with recomputation."""
    changes = {"initializer_range": 0.1, "vocab_size": ARCHITECTURE["vocab_size"]}
    found = []
    for split, mode in ((SPLIT, "full"), ([[*range(10)]], "off")):
        settings = model(
            architecture=tiny(name, **changes),
            implementation="hf",
            gradient_checkpointing=mode,
            max_tokens_per_microbatch=16,
        )
        setup = Setup(model=settings, options=UNITS["layers"], split=split)
        folder = tmp_path / mode
        folder.mkdir()
        ranks(len(split), f"{HERE}:train", setup, save=folder)
        saved = RoleCheckpoint(folder, "actor")
        found.append({name: saved.read(f"exp_avg/{name}") for name, _ in saved.weights()})
    largest = max(abs(gradient).max() for gradient in found[1].values())
    for name, gradient in found[1].items():
        assert abs(gradient - found[0][name]).max() < 1e-5 * largest, name


def test_token_budget_counts_padding_of_padded_models(ranks: RankPool) -> None:
    setup = Setup(model=model(implementation="hf", max_tokens_per_microbatch=16), split=SPLIT)
    outputs, training = zip(*ranks(2, f"{HERE}:row_tokens", setup), strict=True)
    assert outputs == training
    assert max(map(max, outputs)) <= 16


def test_export_of_a_transformers_model_can_be_loaded(ranks: RankPool, tmp_path: Path) -> None:
    architecture = {**MOE, "moe_intermediate_size": 16}  # a size that its kernels support
    setup = Setup(model=model(architecture=architecture, implementation="hf"), split=SPLIT)
    _, loaded = train_and_export(ranks, setup, tmp_path, "hf")
    saved = RoleCheckpoint(tmp_path, "actor")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, torch.from_numpy(saved.read(f"inner.{name}"))), name


@pytest.mark.parametrize("units", UNITS)
def test_transformers_model_generates_like_the_built_in_model(
    ranks: RankPool, tmp_path: Path, units: str
) -> None:
    """Generation is the first call of the engine, and ranks make different numbers of steps."""
    to_hf(plain_decoder(WINDOWED), tmp_path)
    options = GenerationOptions(max_new_tokens=12, stop_token_ids=(3, 4, 5, 6))
    found = []
    for implementation in ("builtin", "hf"):
        settings = model(implementation=implementation)
        setup = Setup(model=settings, options=UNITS[units], split=SPLIT, source=tmp_path)
        results = ranks(2, f"{HERE}:completions", setup, options)
        found.append({name: rows for result in results for name, rows in result.items()})
    assert found[0].keys() == found[1].keys()
    for name, rows in found[0].items():
        for (ours, our_logp), (theirs, their_logp) in zip(rows, found[1][name], strict=True):
            assert ours == theirs
            assert our_logp == pytest.approx(their_logp, abs=1e-4)


def test_transformers_critic_starts_at_zero_and_learns(ranks: RankPool, tmp_path: Path) -> None:
    settings = model(architecture=FAMILIES["gemma"], implementation="hf")
    setup = Setup(model=settings, head="value", split=SPLIT)
    results = ranks(2, f"{HERE}:train", setup, range(2))
    first, second = results[0][0]
    returns = batch().tensor("returns").square().sum().item()
    assert first["error"] == pytest.approx(returns, rel=1e-6)
    assert second["error"] != first["error"]
