"""The owners of the tensors of a weight version."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import pytest

from slurmrl.config.schema.roles import Model
from slurmrl.engines.host import owners_of
from slurmrl.engines.planned import planned_layout
from slurmrl.models.architecture import ModelConfig
from slurmrl.models.shapes import storage_of
from slurmrl.tensors.checkpoint.tensors import file_tensors

MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


@dataclass(frozen=True)
class Placed:
    engine: str
    sizes: dict[str, int]
    expert_sizes: dict[str, int] = field(default_factory=dict)
    virtual_pipeline: int = 1
    sequence_parallel: bool = False
    trained: bool = True
    head: Any = "lm"
    role: str = "actor"

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(prod(self.sizes.values())))


LAYOUTS = {
    "fsdp d4t2": Placed("fsdp", {"dp": 4, "tp": 2}),
    "megatron p2t2": Placed("megatron", {"pp": 2, "dp": 1, "cp": 1, "tp": 2}),
    "megatron d4 e4": Placed(
        "megatron",
        {"pp": 1, "dp": 4, "cp": 1, "tp": 1},
        {"pp": 1, "dp": 1, "ep": 4, "tp": 1},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_write_equal_shares_of_the_tensors(name: str) -> None:
    placed, config = LAYOUTS[name], ModelConfig.from_hf(MOE)
    layout = planned_layout(placed, Model(architecture=MOE, dtype="bfloat16"), config)
    files = file_tensors(layout.tensors.items(), storage_of(config))
    owners = owners_of(files, layout)
    assert owners.keys() == files.keys()
    used = dict.fromkeys(range(layout.ranks), 0)
    for tensor, owner in owners.items():
        used[owner] += files[tensor].spec.bytes
        boxes = [
            part.box.intersect(cut.of(spec.shape))
            for parameter, spec, cut in files[tensor].shards
            for part in layout.holders[parameter].by_rank.get(owner, ())
        ]
        assert any(boxes), f"{tensor} goes to a rank without a part of it"
    assert max(used.values()) <= 1.05 * sum(used.values()) / layout.ranks
