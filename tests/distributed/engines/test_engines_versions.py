"""Weight versions contain the tensors of an export. Each tensor is on exactly one rank."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmrl.config.schema import Lora
from slurmrl.models.adapters import trained_shapes
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.model_tensors import SafetensorsFolder
from slurmrl.models.shapes import file_form
from slurmrl.tensors.checkpoint.export import EXACT, Precision
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from slurmrl.tensors.checkpoint.tensors import Storage, TensorFile, file_entries
from slurmrl.tensors.layout import Box
from slurmrl.tensors.weights.format import VersionId, read_part
from slurmrl.tensors.weights.writer import publish
from slurmrl.workers.rollout import task_weights
from slurmrl.workers.rollout.task_weights import TaskWeights
from tests.distributed.engines.cases import Setup, model
from tests.distributed.engines.megatron_cases import Case, Placed, placed
from tests.distributed.engines.one_process import random_model
from tests.distributed.engines.test_engines_families import FAMILIES
from tests.distributed.engines.test_engines_layouts import MODELS, SPLITS
from tests.distributed.engines.test_engines_megatron import BUDGET, GLM, SINKS, TIED, grid
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
        ("glm4_moe", "bfloat16"),
        ("deepseek_v3", "bfloat16"),
        ("gpt_oss", "bfloat16"),
        ("gpt2", "bfloat16"),
        pytest.param("gpt2", "float32", marks=pytest.mark.long),
        pytest.param("qwen3", "float16", marks=pytest.mark.long),
    ],
)
def test_fsdp_ranks_publish_the_tensors_of_an_export(
    ranks: RankPool, tmp_path: Path, family: str, dtype: str
) -> None:
    settings = model(architecture=MODELS[family], dtype="bfloat16")
    setup = Setup(model=settings, split=SPLITS[2], sizes={"dp": 2, "tp": 2})
    check(ranks, 4, "of_fsdp", setup, dtype, tmp_path, storage_of(MODELS[family]))


@pytest.mark.parametrize(
    ("family", "count"),
    [("gemma", 2), ("mixtral", 2), pytest.param("mixtral", 1, marks=pytest.mark.long)],
)
def test_ranks_of_a_transformers_model_publish_the_tensors_of_an_export(
    ranks: RankPool, tmp_path: Path, family: str, count: int
) -> None:
    """The model stacks its experts. In the files, each expert is a separate tensor."""
    architecture = {**FAMILIES[family], "intermediate_size": 16}  # a size that its kernels support
    settings = model(architecture=architecture, implementation="hf")
    setup = Setup(model=settings, split=SPLITS[count])
    storage = storage_of(architecture, "hf")
    check(ranks, count, "of_fsdp", setup, "bfloat16", tmp_path, storage)


@pytest.mark.parametrize(
    ("where", "architecture"),
    [
        pytest.param(placed(pp=2, tp=2), TIED, id="p2t2 tied"),
        pytest.param(placed(dp=2, experts=grid(1, 1, 2, 1)), GLM, id="d2 experts e2"),
        pytest.param(
            placed(tp=2, sp=True, experts=grid(1, 1, 2, 1)), SINKS, id="t2 experts e2 sinks"
        ),
    ],
)
def test_megatron_ranks_publish_the_tensors_of_an_export(
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
        assert all(version[name][0] == "float32" for name in version if name.endswith(EXACT))
    assert versions[0] != versions[1]
    assert all(rank[0] for rank in results), "a rank writes nothing"


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ({"dp": 2}, "float32"),
        ({"tp": 2}, "bfloat16"),
        pytest.param({"dp": 2}, "bfloat16", marks=pytest.mark.long),
        pytest.param({"tp": 2}, "float32", marks=pytest.mark.long),
        pytest.param({"dp": 2, "tp": 2}, "bfloat16", marks=pytest.mark.long),
    ],
)
def test_task_merges_adapters_to_the_same_bits_as_a_weight_move(
    ranks: RankPool, tmp_path: Path, sizes: dict[str, int], dtype: str
) -> None:
    """The ranks publish adapters, with the fingerprint of the model folder."""
    source, versions = tmp_path / "model", tmp_path / "versions"
    random_model(source, MODELS["qwen3"], "lm")
    lora = Lora(rank=3, alpha=5.0)
    settings = model(architecture=None, dtype=dtype, lora=lora.model_dump())
    split = SPLITS[sizes.get("dp", 1)]
    setup = Setup(model=settings, source=source, split=split, sizes=sizes)
    count = prod(sizes.values())
    results = ranks(count, f"{HERE}:of_adapters", setup, versions)
    folder, version = versions / "1.1", VersionId(1, 1)
    manifest = publish(folder, [read_part(folder, rank) for rank in range(count)], version, None)
    config = ModelConfig.from_hf(MODELS["qwen3"])
    assert manifest.by_name.keys() == trained_shapes(config, "lm", lora).keys()

    frozen, device = tmp_path / "frozen", torch.device("cpu")
    host = task_weights.MergingHost(source, frozen, config, dtype, lora, device)
    taken = TaskWeights(versions, tmp_path / "host", MODELS["qwen3"], host).newer()
    assert taken is not None
    assert taken.folder is not None
    files = SafetensorsFolder(taken.folder)
    found = {
        name: (spec.dtype, spec.shape, files.read(name, Box.whole(spec.shape)).tobytes())
        for name, spec in files.specs().items()
    }
    assert found == {name: tensor for rank in results for name, tensor in rank.items()}
    before = TensorFile(frozen / task_weights.ADAPTED).flat(ADAPTED)
    assert found[ADAPTED][2] != before.tobytes(), "the adapters have no effect"


def exported(folder: Path, dtype: str, storage: Storage) -> Taken:
    """The tensors that an export of a checkpoint has."""
    weights = RoleCheckpoint(folder, "actor")
    entries = file_entries(weights.weights(), weights.read, storage)
    converted = map(Precision(dtype).apply, entries)
    return {e.name: (e.spec.dtype, e.spec.shape, e.data().tobytes()) for e in converted}
