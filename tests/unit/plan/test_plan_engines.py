"""The layouts and settings that each engine supports, and the refusal of others."""

from __future__ import annotations

import pytest

from slurmrl.config.allocation import parse
from slurmrl.config.schema import Model
from slurmrl.plan.checks import fit
from slurmrl.plan.checks.fit import Misfit
from slurmrl.plan.estimates.shape import Lengths, read
from tests.unit.plan.conftest import EXPERTS, Load

SHAPE = read(
    {
        "model_type": "qwen3_moe",
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "moe_intermediate_size": 12,
    }
)


@pytest.mark.parametrize("layout", ["fsdp:d2t2", "megatron:d2p2e2"])
def test_engines_that_train_replay_experts(layout: str, plan_ppo: Load) -> None:
    layouts = (f"actor.backend={layout}", "rollout.backend=native:d4")
    found = plan_ppo("rollout.replay_experts=true", *layouts, architecture=EXPERTS)
    [training] = [
        call for call in found.algorithm.calls(found.config) if call.name == "actor_train"
    ]
    assert "experts" in training.inputs


def problems(layout: str) -> list[Misfit]:
    lengths = Lengths(sequences=16, longest=13, new_tokens=0, assumed=False)
    allocation = parse(f"fsdp:{layout}")
    return list(fit.check(fit.Fit(Model(), allocation, SHAPE, lengths)))


@pytest.mark.parametrize("layout", ["t2", "t4", "c2", "c4", "c8", "t2c4", "t4c2"])
def test_heads_are_split_or_copied_and_tokens_filled_up(layout: str) -> None:
    assert problems(layout) == []


@pytest.mark.parametrize(
    ("layout", "axis", "message"),
    [
        ("t3", "tp", "t3 does not divide num_attention_heads 8"),
        ("t8", "tp", "t8 does not divide the inner size of experts 12"),
        ("c3", "cp", "c3 does not divide the attention heads of a rank, 8"),
        ("t4c4", "cp", "c4 does not divide the attention heads of a rank, 2"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(layout: str, axis: str, message: str) -> None:
    [misfit] = problems(layout)
    assert misfit.axis == axis
    assert message in misfit.reason
