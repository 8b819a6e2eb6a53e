"""Settings, roles and calls of the algorithms."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from slurmrl.algorithms.base import Interface
from slurmrl.algorithms.policy.hyperparameters import KL
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.algorithms.preference_schema import DPO, KTO, RewardModel
from slurmrl.algorithms.schema import AlgorithmSchema
from slurmrl.algorithms.supervised_schema import SFT, Distill
from slurmrl.config.schema import Config, Dataset, Evaluation, Model
from slurmrl.plan.dataflow import DATASET_KEYS, Graph
from slurmrl.registry import resolve


def config(evaluation_type: str = "prompt") -> Config:
    held_out = Dataset.model_validate({"type": evaluation_type, "path": "x"})
    return Config(
        experiment="test",
        total_steps=1,
        algorithm={},
        actor=Model(),
        dataset=held_out,
        evaluation=Evaluation(dataset=held_out),
    )


ALGORITHMS = (
    SFT(batch_size=8),
    PolicyGradient(batch_size=8, recompute_logprobs=True),
    PolicyGradient(batch_size=8, advantage="greedy", kl=KL(coef=0.0)),
    DPO(batch_size=8),
    KTO(batch_size=8),
    RewardModel(batch_size=8),
    Distill(batch_size=8),
)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.name)
def test_calls_form_a_graph_and_name_real_interfaces(algorithm: AlgorithmSchema) -> None:
    graphs = [(algorithm.calls(config()), algorithm.dataset_types[0])]
    for kind in algorithm.evaluation_types:
        graphs.append((algorithm.evaluation_calls(config(kind)), kind))
    roles = {use.role for use in algorithm.roles()}
    for calls, kind in graphs:
        assert Graph(calls, DATASET_KEYS[kind]).order
        for call in calls:
            interface = resolve(call.interface)
            assert getattr(interface, call.method.value) is not getattr(
                Interface, call.method.value
            )
            assert call.role is None or call.role in roles


@pytest.mark.parametrize(
    ("options", "roles"),
    [
        ({}, ["actor", "critic", "ref"]),
        ({"advantage": "group"}, ["actor", "ref"]),
        ({"kl": {"coef": 0.0}}, ["actor", "critic"]),
        ({"advantage": "none", "kl": {"coef": 0.0}}, ["actor"]),
    ],
)
def test_graph_has_only_models_that_the_settings_need(
    options: dict[str, Any], roles: list[str]
) -> None:
    """Their calls, keys and metrics are missing too."""
    algorithm = PolicyGradient.model_validate({"batch_size": 8, **options})
    assert [use.role for use in algorithm.roles()] == roles
    calls = {call.name: call for call in algorithm.calls(config())}
    assert {call.role for call in calls.values()} - {None} == set(roles)
    assert ("values" in calls["actor_train"].inputs) == ("critic" in roles)
    assert ("ref_logprobs" in calls["actor_train"].inputs) == ("ref" in roles)
    assert ("kl" in calls["actor_train"].metrics) == ("ref" in roles)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"advantage": "greedy", "advantage_std": "group"}, "allowed with advantage: group,"),
        ({"advantage": "group", "std_epsilon": 0.1}, "with advantage_std: none"),
        ({"advantage": "none", "critic_warmup_steps": 1}, "which does not use it"),
        ({"advantage": "group", "discount": 0.9}, "one return per completion"),
        ({"advantage": "group", "gae_lambda": 0.9}, "has no values"),
        ({"kl": {"kind": "adaptive", "coef": 0.0}}, "use more than 0"),
        ({"kl": {"where": "loss"}}, "allowed: k2, k3"),
        ({"overlong_buffer": 4, "mask_no_eos_with_zero": True}, "a reward of 0 would replace"),
        ({"reward_scaling": 0.0}, "all rewards would be equal"),
        ({"overlong_penalty": 0.5}, "without overlong_buffer"),
        ({"mask_truncated": True, "max_truncated": 0.0}, "which drops every prompt"),
        ({"kl": {"target": 3.0}}, "target is not allowed with kind: fixed"),
        ({"kl": {"horizon": 99.0}}, "horizon is not allowed with kind: fixed"),
        ({"filter_rounds": 2}, "filter_rounds is not allowed with zero_variance: keep"),
        ({"short_batch": "error"}, "short_batch is not allowed with zero_variance: keep"),
        ({"filter_candidates": 9}, "filter_candidates is not allowed with zero_variance: keep"),
    ],
)
def test_contradictory_settings_are_rejected_with_the_reason(
    options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=re.escape(reason)):
        PolicyGradient.model_validate({"batch_size": 8, **options})
