"""Elements of models of transformers on tensor ranks: the plan counts what ranks hold."""

from __future__ import annotations

import pytest
import torch

from slurmrl.config.allocation import parse
from slurmrl.config.schema import Model
from slurmrl.models.hf_config import HFConfig
from slurmrl.models.hf_model import HFModel
from slurmrl.models.parallel.split import Axis
from slurmrl.plan.estimates.memory import MemoryDemand, estimate
from slurmrl.plan.estimates.server_types import shape_on
from slurmrl.plan.estimates.shape import layer_parameters, parameters, shape_of
from tests.support.families import tiny

SHARED_EXPERTS_WHOLE = [
    "afmoe",
    "cohere2_moe",
    "exaone_moe",
    "glm4_moe_lite",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "minimax_m3_vl_text",
    "qwen2_moe",
    "solar_open",
]
"""Families whose plan of transformers does not split the shared experts."""
OTHERS = ["deepseek_v3", "gemma3_text", "gpt_oss", "olmo2", "qwen3_next"]


def held(family: str, rank: int) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of one of two tensor ranks."""
    config = HFConfig.from_hf(tiny(family))
    model = HFModel(config, "lm", source=None, seed=0, dtype=torch.float32)
    model.split(Axis(rank, 2))
    return list(model.named_parameters())


@pytest.mark.parametrize("family", [*SHARED_EXPERTS_WHOLE, *OTHERS])
def test_plan_counts_elements_that_a_tensor_rank_holds(family: str) -> None:
    model = Model(architecture=tiny(family), implementation="hf", dtype="bfloat16")
    shape, layout = shape_of(model), parse("fsdp:d1t2")
    assert shape is not None
    own = held(family, 0)
    counts = [sum(each.numel() for _, each in held(family, rank)) for rank in range(2)]
    assert parameters(shape, layout, "lm").total == counts[0] == counts[1]
    experts = sum(each.numel() for name, each in own if ".experts." in name)
    assert parameters(shape, layout, "lm").experts == experts
    usage = estimate(
        MemoryDemand(
            model, shape, layout, "lm", trained=True, computes=True, generates=False, lengths=None
        )
    )
    assert usage.weights == 4 * counts[0]  # a trained shard is float32
    layers: dict[str, int] = {}
    for name, each in own:
        if ".layers." in name:
            layer = name.partition(".layers.")[2].partition(".")[0]
            layers[layer] = layers.get(layer, 0) + each.numel()
    largest = max(layer_parameters(shape, layout, moe=moe).total for moe in (False, True))
    assert largest == max(layers.values())


def test_servers_share_every_layer_of_a_family() -> None:
    """The servers' split does not follow the plan of transformers."""
    shape = shape_of(Model(architecture=tiny("afmoe"), implementation="hf"))
    assert shape is not None
    served = shape_on(shape, parse("sglang:d1t2"))
    whole, half = (parameters(served, parse(f"sglang:d1t{t}"), "lm").total for t in (1, 2))
    assert half < 0.6 * whole < parameters(shape, parse("fsdp:d1t2"), "lm").total
    assert shape_on(shape, parse("fsdp:d1t2")) is shape
