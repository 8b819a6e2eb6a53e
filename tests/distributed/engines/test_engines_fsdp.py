"""Tests of the fsdp engine: start of weights, types, frozen models and exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from slurmrl.data.sample import SequenceSample
from slurmrl.engines.base import Outputs
from slurmrl.engines.fsdp.engine import FSDPEngine
from slurmrl.engines.role_weights import init_tensor
from slurmrl.errors import CheckpointError
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.decoder import build
from slurmrl.models.shapes import EMBEDDING, LM_HEAD, parameter_shapes
from slurmrl.tensors.checkpoint.export import export
from slurmrl.tensors.checkpoint.manifest import read_manifest, verify, write_manifest
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from tests.distributed.engines.cases import ARCHITECTURE, Setup, batch, make, model
from tests.pool import RankError, RankPool

HERE = "tests.distributed.engines.cases"
HERE_TOO = "tests.distributed.engines.test_engines_fsdp"
CONFIG = ModelConfig.from_hf(ARCHITECTURE)


def random_weights(head: Any, seed: int) -> dict[str, Tensor]:
    shapes = parameter_shapes(CONFIG, head)
    return {name: init_tensor(name, shape, CONFIG, seed) for name, shape in shapes.items()}


def assembled(results: list[list[tuple[str, tuple[int, ...], Tensor]]]) -> dict[str, Tensor]:
    """Whole tensors from the chunks of all ranks, which come in the order of dim 0."""
    found: dict[str, list[Tensor]] = {}
    for name, start, values in (chunk for rank in results for chunk in rank):
        assert start[0] == sum(len(part) for part in found.get(name, []))
        found.setdefault(name, []).append(values)
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A language model in Hugging Face form."""
    source = tmp_path / "source"
    source.mkdir()
    save_file(random_weights("lm", 5), source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    return source


@pytest.mark.parametrize("n", [1, 2, 4])
def test_random_weights_do_not_depend_on_the_ranks(ranks: RankPool, n: int) -> None:
    found = assembled(ranks(n, f"{HERE}:start_values", Setup(model=model())))
    expected = random_weights("lm", 7)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_are_loaded_from_a_directory(ranks: RankPool, folder: Path) -> None:
    setup = Setup(model=model(architecture=None), source=folder)
    found = assembled(ranks(4, f"{HERE}:start_values", setup))
    expected = random_weights("lm", 5)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_critic_loads_the_body_and_predicts_zero(ranks: RankPool, folder: Path) -> None:
    setup = Setup(model=model(architecture=None), source=folder, head="value")
    found = assembled(ranks(2, f"{HERE}:start_values", setup))
    expected = random_weights("lm", 5)
    assert torch.equal(found.pop("score.weight"), torch.zeros(1, ARCHITECTURE["hidden_size"]))
    assert set(expected) - set(found) == {"lm_head.weight"}
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_directory_with_other_shapes_is_rejected(ranks: RankPool, folder: Path) -> None:
    wrong = {**CONFIG.to_hf(), "vocab_size": 34}
    (folder / "config.json").write_text(json.dumps(wrong))
    setup = Setup(model=model(architecture=None), source=folder)
    with pytest.raises(RankError, match=r"embed_tokens.weight \[33, 20\] instead of \[34, 20\]"):
        ranks(1, f"{HERE}:start_values", setup)


@pytest.mark.parametrize("n", [1, 2])
def test_bfloat16_trains_on_float32_weights(ranks: RankPool, tmp_path: Path, n: int) -> None:
    split = [list(range(10)), []][:n]
    results = []
    for dtype in ("float32", "bfloat16"):
        (tmp_path / dtype).mkdir()
        setup = Setup(model=model(dtype=dtype), split=split)
        results.append(ranks(n, f"{HERE}:train", setup, range(2), save=tmp_path / dtype)[0][0])
    exact, rough = ([stats["loss"] for stats in result] for result in results)
    assert rough == pytest.approx(exact, rel=0.05, abs=0.02)
    assert rough != exact
    layout = RoleCheckpoint(tmp_path / "bfloat16", "actor").layout
    assert {spec.dtype for spec in layout.tensors.values()} == {"float32"}


@pytest.mark.parametrize("n", [1, 2])
def test_frozen_model_saves_nothing_and_keeps_its_dtype(
    ranks: RankPool, tmp_path: Path, n: int
) -> None:
    setup = Setup(model=model(dtype="bfloat16"), trained=False)
    for files, message in ranks(n, f"{HERE}:frozen", setup, tmp_path):
        assert files == []
        assert "actor is frozen" in message
    found = assembled(ranks(n, f"{HERE}:start_values", setup))
    for name, value in random_weights("lm", 7).items():
        assert torch.equal(found[name], value.bfloat16())


def test_empty_global_batch_is_rejected(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="the batch is empty on every rank"):
        ranks(2, f"{HERE}:train", Setup(model=model(), split=[[], []]))


def test_checkpoint_of_another_model_is_rejected(ranks: RankPool, tmp_path: Path) -> None:
    setup = Setup(model=model(), split=[[0], [1]])
    ranks(2, f"{HERE}:train", setup, save=tmp_path)
    other = {**ARCHITECTURE, "intermediate_size": 52}
    setup = Setup(model=model(architecture=other), split=[[0], [1]])
    with pytest.raises(RankError, match=r"mlp\.gate_proj\.weight' is .*\(50, 20\)"):
        ranks(2, f"{HERE}:train", setup, range(1, 1), load=tmp_path)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_loads_an_export(ranks: RankPool, tmp_path: Path, tied: bool) -> None:
    architecture = {**ARCHITECTURE, "tie_word_embeddings": tied}
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    setup = Setup(model=model(architecture=architecture), split=[[0, 1], [2, 3]])
    results = ranks(2, f"{HERE}:train", setup, range(2), save=checkpoint)
    files = [file for _, files in results for file in files]
    write_manifest(checkpoint, step=2, files=files, state={"cursor": [0, 4]})
    assert verify(checkpoint) == read_manifest(checkpoint)
    config = ModelConfig.from_hf(architecture)
    weights = RoleCheckpoint(checkpoint, "actor")
    folder = export(weights, config.to_hf(), tmp_path / "export", generation={})
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    decoder = build(config)
    decoder.load_state_dict(load_file(folder / "model.safetensors"))
    ids = torch.arange(9)
    with torch.no_grad():
        hidden = decoder(ids, torch.tensor([0, 9], dtype=torch.int32), 9)
        expected = loaded(ids[None]).logits[0]
    assert torch.allclose(hidden @ decoder.head_weight().t(), expected, atol=1e-5)
    changed = load_file(folder / "model.safetensors")["model.norm.weight"]
    assert not torch.equal(changed, torch.ones_like(changed))


def test_missing_rank_file_is_rejected(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, f"{HERE}:train", Setup(model=model(), split=[[0], [1]]), save=tmp_path)
    (tmp_path / "actor.1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"actor\.1\.safetensors does not exist"):
        RoleCheckpoint(tmp_path, "actor").read("model.norm.weight")


def gathered_before_backward(setup: Setup) -> dict[str, bool]:
    """Return whether the embedding and the output projection are gathered between the forward and
    backward pass, and after a step.
    """
    engine = make(setup)
    assert isinstance(engine, FSDPEngine)
    decoder, seen = engine._shards.decoder, {}

    def gathered() -> set[str]:
        return {name for name, p in decoder.named_parameters() if not isinstance(p, DTensor)}

    def loss(outputs: Outputs, _: SequenceSample) -> tuple[Tensor, dict[str, Tensor]]:
        names = gathered()
        seen.update({name: name in names for name in (EMBEDDING, LM_HEAD)})
        return outputs["logp"].sum(), {}

    engine.train_batch(batch(), loss, 1.0)
    assert not gathered()
    return seen


def test_embedding_and_projection_are_gathered_only_when_used(ranks: RankPool) -> None:
    """The embedding is freed during the layers; the projection is kept for its backward pass."""
    setup = Setup(model=model(), options={"small_bytes": 0})
    for seen in ranks(2, f"{HERE_TOO}:gathered_before_backward", setup):
        assert seen == {EMBEDDING: False, LM_HEAD: True}
