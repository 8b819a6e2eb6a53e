"""The fsdp engine's placement of a model on many ranks."""

from __future__ import annotations

import pytest

from slurmrl.engines.planned import Placing
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.parallel.boxes import TensorSplit
from slurmrl.models.shapes import parameter_shapes
from slurmrl.tensors.parallel.topology import ProcessTopology

MOMENTS = ("", "exp_avg/", "exp_avg_sq/")


def placing(layers: int, d: int, t: int, rank: int) -> Placing:
    values = {
        "model_type": "qwen2", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 192,
        "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 2,
    }  # fmt: skip
    config = ModelConfig.from_hf(values)
    topology = ProcessTopology(("dp", "tp"), (d, t))
    tensor = TensorSplit(config, t) if t > 1 else None
    return Placing(parameter_shapes(config, "lm"), "float32", topology, rank, tensor)


@pytest.mark.parametrize(("d", "t"), [(1024, 1), (256, 4), (3, 4)])
def test_layout_size_does_not_grow_with_the_layers(d: int, t: int) -> None:
    """The layout has as many parts as the layout of one layer, moments included."""
    counts = [
        sum(len(p.parts) for p in {*placing(layers, d, t, 0).layout(MOMENTS).holders.values()})
        for layers in (1, 40)
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize(("d", "t"), [(5, 1), (1, 4), (3, 4)])
def test_boxes_of_a_rank_equal_the_layout(d: int, t: int, copies: bool) -> None:
    layout = placing(2, d, t, 0).layout(copies=copies)
    layout.check()
    for rank in range(d * t):
        own = {name: box for name, box in placing(2, d, t, rank).own_boxes().items() if box.count}
        held = {shard.name: shard.box for shard in layout.held_by(rank)}
        assert held.items() <= own.items()
        assert not copies or held == own
    if not copies:
        elements = sum(shard.box.count for _, shard in layout.all_shards())
        assert elements == sum(spec.bytes // 4 for spec in layout.tensors.values())
