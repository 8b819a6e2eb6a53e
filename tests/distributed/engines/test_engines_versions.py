"""The tensors of weight versions: the ranks have those of an export, each of them on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurmrl.checkpoint.precision import Precision
from slurmrl.checkpoint.shards import RoleCheckpoint
from slurmrl.checkpoint.stored import Storage, file_entries
from slurmrl.checkpoint.tensors import TensorFile
from slurmrl.config.schema import Lora
from slurmrl.layout.box import Box
from slurmrl.models.config import ModelConfig
from slurmrl.models.merged import MergedCheckpoint
from slurmrl.models.storage import file_form
from tests.distributed.engines.cases import Setup, model
from tests.distributed.engines.megatron_cases import Case, Placed, placed
from tests.distributed.engines.one_process import random_model
from tests.distributed.engines.test_engines_families import FAMILIES
from tests.distributed.engines.test_engines_layouts import MODELS, SPLITS
from tests.distributed.engines.test_engines_megatron import BUDGET, MOE, TIED, grid
from tests.distributed.engines.version_cases import Taken
from tests.pool import RankPool

ADAPTED = "model.layers.0.self_attn.q_proj.weight"
HERE = "tests.distributed.engines.version_cases"
STEPS = 3


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen2", "bfloat16"),
        ("qwen3_moe", "bfloat16"),
        ("gpt2", "bfloat16"),
        pytest.param("gpt2", "float32", marks=pytest.mark.long),
        pytest.param("qwen3", "float16", marks=pytest.mark.long),
    ],
)
def test_ranks_of_fsdp_have_the_tensors_of_an_export(
    ranks: RankPool, tmp_path: Path, family: str, dtype: str
) -> None:
    settings = model(architecture=MODELS[family], dtype="bfloat16")
    setup = Setup(model=settings, split=SPLITS[2], sizes={"dp": 2, "tp": 2})
    check(ranks, 4, "of_fsdp", setup, dtype, tmp_path, storage_of(MODELS[family]))


def test_ranks_of_a_model_of_transformers_do_too(ranks: RankPool, tmp_path: Path) -> None:
    settings = model(architecture=FAMILIES["gemma"], implementation="hf")
    setup = Setup(model=settings, split=SPLITS[2])
    storage = storage_of(FAMILIES["gemma"], "hf")
    check(ranks, 2, "of_fsdp", setup, "bfloat16", tmp_path, storage)


@pytest.mark.parametrize(
    ("where", "architecture"),
    [
        pytest.param(placed(pp=2, tp=2), TIED, id="p2t2 tied"),
        pytest.param(placed(dp=2, experts=grid(1, 1, 2, 1)), MOE, id="d2 experts e2"),
    ],
)
def test_ranks_of_megatron_do_too(
    ranks: RankPool, tmp_path: Path, where: Placed, architecture: dict[str, Any]
) -> None:
    case = Case(where, model(architecture=architecture, dtype="bfloat16", **BUDGET))
    count, storage = len(where.ranks), storage_of(architecture)
    check(ranks, count, "of_megatron", case, "bfloat16", tmp_path, storage)


def storage_of(architecture: dict[str, Any], implementation: str = "builtin") -> Storage:
    return file_form(architecture, implementation, "lm")[1]  # type: ignore[arg-type]


def check(
    ranks: RankPool, count: int, case: str, setup: Any, dtype: str, folder: Path, storage: Storage
) -> None:
    for number in range(STEPS):
        (folder / str(number)).mkdir()
    results = ranks(count, f"{HERE}:{case}", setup, dtype, folder)
    versions = [
        {name: tensor for rank in results for name, tensor in rank[number].items()}
        for number in range(STEPS)
    ]
    for number, version in enumerate(versions):
        owned = [name for rank in results for name in rank[number]]
        assert len(owned) == len(version), "a tensor has two owners"
        assert version == exported(folder / str(number), dtype, storage), number
    assert versions[0] != versions[1]
    assert all(rank[0] for rank in results), "a rank writes nothing"


def test_adapters_are_merged(ranks: RankPool, tmp_path: Path) -> None:
    random_model(tmp_path / "model", MODELS["qwen3"], "lm")
    lora = Lora(rank=3, alpha=5.0)
    settings = model(architecture=None, lora=lora.model_dump())
    source = tmp_path / "model"
    setup = Setup(model=settings, source=source, split=SPLITS[2], sizes={"dp": 2, "tp": 2})
    for number in range(STEPS):
        (tmp_path / str(number)).mkdir()
    results = ranks(4, f"{HERE}:of_fsdp", setup, "float32", tmp_path)
    found: Taken = {name: tensor for rank in results for name, tensor in rank[-1].items()}
    trained = RoleCheckpoint(tmp_path / str(STEPS - 1), "actor")
    config = ModelConfig.from_hf(MODELS["qwen3"])
    merged = MergedCheckpoint(trained, source, config, "lm", lora)
    specs = dict(merged.weights())
    assert found.keys() == specs.keys()
    for name, spec in specs.items():
        dtype, shape, bits = found[name]
        assert (dtype, shape) == ("float32", spec.shape)
        values = np.frombuffer(bits, np.float32).reshape(shape)
        assert np.allclose(values, merged.read(name, Box.whole(shape)), rtol=0, atol=1e-6), name
    assert not np.array_equal(
        np.frombuffer(found[ADAPTED][2], np.float32), _base(source, ADAPTED)
    ), "the adapters have no effect"


def _base(source: Path, name: str) -> Any:
    return TensorFile(source / "model.safetensors").flat(name)


def exported(folder: Path, dtype: str, storage: Storage) -> Taken:
    """The tensors that an export of a checkpoint has."""
    weights = RoleCheckpoint(folder, "actor")
    entries = file_entries(weights.weights(), weights.read, storage)
    converted = map(Precision(dtype).apply, entries)
    return {e.name: (e.spec.dtype, e.spec.shape, e.data().tobytes()) for e in converted}
