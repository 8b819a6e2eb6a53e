"""Places of parameters in megatron's modules, assembled from all ranks of a layout."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurmrl.engines import ENGINES
from slurmrl.engines.megatron.parts import (
    MegatronModel,
    Place,
    misfits,
    part_of_flat,
    parts_of,
    place_of,
)
from slurmrl.errors import UsageError
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.shapes import parameter_shapes
from slurmrl.tensors.layout import Box, Layout, Shard, TensorSpec
from slurmrl.tensors.parallel.topology import ProcessTopology

DENSE: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
}  # fmt: skip
SPARSE = {
    **DENSE, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 6, "mlp_only_layers": [0],
}  # fmt: skip
CLAMPED = {**DENSE, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("dense", "found"),
    [
        ([0], [[(0, 0), (0, 1)], [(1, 2), (2, 3)]]),
        ([2], [[(0, 1), (1, 2)], [(2, 2), (2, 3)]]),
    ],
)
def test_pipeline_chunks_contain_the_experts_of_their_layers(
    dense: list[int], found: list[list[tuple[int, int]]]
) -> None:
    """Two stages with two chunks each have the layers alternately."""
    config = ModelConfig.from_hf({**SPARSE, "mlp_only_layers": dense})
    places = [Place(pp=2, pp_rank=rank, virtual=2) for rank in range(2)]
    stages = [stage for pair in zip(*(p.stages(4) for p in places), strict=True) for stage in pair]
    blocks = [stage.blocks(config) for stage in stages]
    assert [(one.start, one.stop) for one in blocks] == [one for pair in found for one in pair]


def all_parts(values: dict[str, Any], head: Any, grid: dict[str, int], **more: Any) -> Layout:
    config = ModelConfig.from_hf(values)
    topology = ProcessTopology(tuple(grid), tuple(grid.values()))
    experts = more.get("experts")
    own = ProcessTopology(tuple(experts), tuple(experts.values())) if experts else None
    shards = []
    for rank in range(topology.world_size):
        place = place_of(topology, own, more.get("virtual", 1), rank)
        found = parts_of(config, head, place, 12, grouped=more.get("grouped", False))
        shards.append(tuple(shard for part in found.values() for shard in part))
    shapes = parameter_shapes(config, head)
    return Layout.of({n: TensorSpec(s, "float32") for n, s in shapes.items()}, shards)


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("grid", "more"),
    [
        ({"pp": 1, "tp": 1}, {}),
        ({"pp": 2, "dp": 2, "tp": 2}, {}),
        ({"pp": 2, "tp": 2}, {"virtual": 2}),
        ({"pp": 4}, {}),
    ],
)
def test_ranks_together_hold_every_element(
    head: str, tied: bool, grid: dict[str, int], more: dict[str, Any]
) -> None:
    layout = all_parts({**DENSE, "tie_word_embeddings": tied}, head, grid, **more)
    layout.check()
    elements = sum(shard.box.count for _, shard in layout.all_shards())
    assert elements >= sum(np.prod(spec.shape) for spec in layout.tensors.values())


@pytest.mark.parametrize(
    "experts",
    [
        {"pp": 1, "dp": 1, "ep": 2, "tp": 2},
        {"pp": 1, "dp": 4, "ep": 1, "tp": 1},
        {"pp": 1, "dp": 1, "ep": 4, "tp": 1},
        {},
    ],
)
def test_experts_have_their_own_process_grid(experts: dict[str, int]) -> None:
    layout = all_parts(SPARSE, "lm", {"pp": 1, "dp": 2, "cp": 1, "tp": 2}, experts=experts)
    layout.check()
    name = "model.layers.1.mlp.experts.gate_proj"
    held = sum(shard.box.count for _, shard in layout.all_shards() if shard.name == name)
    assert held == 4 * 6 * 8 * experts.get("dp", 2)


def test_query_key_and_value_rows_of_a_group_are_adjacent() -> None:
    found = parts_of(ModelConfig.from_hf(DENSE), "lm", Place(tp=2, tp_rank=1), 12, grouped=False)
    weight = found["0.decoder.layers.3.self_attention.linear_qkv.weight"]
    attention = "model.layers.3.self_attn."
    assert [(p.name.removeprefix(attention), p.box.start[0], p.offset) for p in weight] == [
        ("q_proj.weight", 4, 0),
        ("k_proj.weight", 2, 32),
        ("v_proj.weight", 2, 48),
    ]
    bias = found["0.decoder.layers.3.self_attention.linear_qkv.bias"]
    assert [(p.box.start[0], p.box.size[0], p.offset) for p in bias] == [
        (4, 4, 0), (2, 2, 4), (2, 2, 6),
    ]  # fmt: skip


def test_rows_beyond_the_vocabulary_are_padding() -> None:
    found = parts_of(ModelConfig.from_hf(DENSE), "lm", Place(tp=2, tp_rank=1), 12, grouped=False)
    (rows,) = found["0.output_layer.weight"]
    assert (rows.box.start[0], rows.box.size[0]) == (6, 4)


def test_chunks_alternate_over_pipeline_stages() -> None:
    place = Place(pp=2, pp_rank=1, virtual=2)
    found = parts_of(ModelConfig.from_hf(DENSE), "lm", place, 12, grouped=False)
    norms = {s: p[0].name for s, p in found.items() if s.endswith("input_layernorm.weight")}
    assert norms == {
        "0.decoder.layers.0.input_layernorm.weight": "model.layers.1.input_layernorm.weight",
        "1.decoder.layers.0.input_layernorm.weight": "model.layers.3.input_layernorm.weight",
    }


@given(st.lists(st.integers(0, 24), max_size=5))
def test_flat_ranges_cover_the_same_elements_as_the_pieces(cuts: list[int]) -> None:
    shards = [
        Shard.contiguous("a", Box((2, 0), (3, 4)), "s"),
        Shard.contiguous("b", Box((0, 4), (2, 4)), "s", 12),
    ]
    whole = np.full(24, -1)
    flat = np.arange(24)
    for first, last in pairwise(sorted({0, 24, *cuts})):
        part = flat[first:last]
        for shard in part_of_flat(shards, first, last):
            values = part[shard.offset : shard.offset + shard.box.count].reshape(shard.box.size)
            target = next(own for own in shards if own.name == shard.name)
            view = whole[target.offset : target.offset + target.box.count]
            inner = tuple(
                slice(a - b, a - b + n)
                for a, b, n in zip(shard.box.start, target.box.start, shard.box.size, strict=True)
            )
            view.reshape(target.box.size)[inner] = values
    assert np.array_equal(whole[:20], flat[:20])
    assert (whole[20:] == -1).all()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"model_type": "gpt2", "vocab_size": 8, "n_embd": 8, "n_layer": 2, "n_head": 2},
            "needs rotary positions",
        ),
        (
            {**DENSE, "model_type": "qwen3", "attention_bias": True},
            "only in the matrices of queries",
        ),
        ({**SPARSE, "num_experts_per_tok": 1, "norm_topk_prob": True}, "every expert the weight 1"),
        (
            {**DENSE, "model_type": "gpt_oss", "attention_bias": False},
            "only in the matrices of queries",
        ),
        ({**DENSE, "model_type": "gpt9"}, "is not supported"),
    ],
)
def test_unsupported_models_are_rejected(values: dict[str, Any], reason: str) -> None:
    with pytest.raises((UsageError, ValueError), match=reason):
        MegatronModel.from_hf(values)


def test_supported_models_are_accepted() -> None:
    for values in (SPARSE, {**SPARSE, "output_router_logits": True}):
        assert MegatronModel.from_hf(values) == ModelConfig.from_hf(values)


@pytest.mark.parametrize(
    ("values", "place", "vocabulary", "message"),
    [
        (DENSE, {"tp": 4}, 12, "t4 does not divide num_key_value_heads 2"),
        (DENSE, {"pp": 3}, 12, "p3 does not divide num_hidden_layers 4"),
        (DENSE, {"pp": 2, "virtual": 4}, 12, "p2 times 4 chunks does not divide num_hidden"),
        (DENSE, {"tp": 2}, 20, "t2 leaves a rank without a token of the vocabulary of 10"),
        (SPARSE, {"ep": 3}, 12, "e3 does not divide the number of experts 4"),
        (SPARSE, {"etp": 4}, 12, "t4 of experts does not divide their inner size 6"),
        (CLAMPED, {"etp": 2}, 12, "t2 of experts cannot split their biases"),
    ],
)
def test_layout_that_does_not_fit_the_model_is_reported(
    values: dict[str, Any], place: dict[str, int], vocabulary: int, message: str
) -> None:
    config = ModelConfig.from_hf(values)
    (found,) = misfits(config, Place(**place), vocabulary)
    assert found.startswith(message)
    assert not list(misfits(config, Place(tp=2, pp=2, virtual=2), 12))


@pytest.mark.parametrize(("values", "tp"), [(SPARSE, 1), (DENSE, 2), (SPARSE, 2)])
def test_training_experts_on_tensor_ranks_needs_sequence_parallelism(
    values: dict[str, Any], tp: int
) -> None:
    config, place = ModelConfig.from_hf(values), Place(tp=tp, etp=tp)
    found = [*misfits(config, place, 12, trains_whole=True)]
    said = ["on t2, experts can be trained only with sequence parallelism"]
    assert found == (said if values is SPARSE and tp == 2 else [])
    assert not [*misfits(config, place, 12)]


def test_missing_package_is_reported_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name == "megatron.core" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(UsageError, match=r"needs megatron-core: pip install megatron-core=="):
        ENGINES.load("megatron")("actor")


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_reported() -> None:
    code = "from slurmrl.engines.megatron import require; require()"
    run = subprocess.run(  # a process without the GPU that tests emulate
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert "the megatron engine needs a GPU" in run.stderr.splitlines()[-1]
