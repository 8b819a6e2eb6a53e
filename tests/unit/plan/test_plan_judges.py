"""Models besides actor, critic and reference: teachers, and the reward model behind a reward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmrl.errors import ConfigError
from slurmrl.plan.build import make_plan
from slurmrl.plan.settings import load_settings
from tests.unit.plan.conftest import Load, write_model

SCORED = ("reward.name=model", "reward_model.path=judge")
DISTILL = ("algorithm={name: distill, batch_size: 64}", "teacher.path=judge")


@pytest.fixture
def load(folder: Path, load_ppo: Load, monkeypatch: pytest.MonkeyPatch) -> Load:
    write_model(folder / "judge")
    monkeypatch.chdir(folder)
    return load_ppo


def problems(load: Callable[..., Any], *overrides: str) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return [(problem.key, problem.message) for problem in caught.value.problems]


def test_reward_model_runs_before_the_reward_function(load: Load) -> None:
    """The reward model is frozen, has a value head and the actor's layout, in training and
    evaluations.
    """
    settings = load(*SCORED)
    plan = make_plan(settings, scheduler="local")
    model = plan.models["reward_model"]
    assert (model.head, model.trained, model.backend) == ("value", False, "fsdp:d2")
    assert settings.config.reward_model is not None
    assert settings.config.reward_model.path != settings.config.actor.path
    for calls in (plan.calls, plan.evaluation_calls):
        names = [call.name for call in calls]
        assert names.index("reward_model_inf") < names.index("reward_inf")
        judge = next(call for call in calls if call.name == "reward_inf")
        assert "model_scores" in judge.inputs
        assert judge.role is None


def test_unused_model_section_is_accepted_in_a_resumed_trial(load: Load, folder: Path) -> None:
    """An older slurmrl accepted the section, whose settings would be ignored."""
    with pytest.raises(ConfigError, match="remove the section"):
        load("teacher.path=judge")
    resumed = load_settings(
        folder / "ppo.yaml", ["teacher.path=judge"], planning=True, resumed=True
    )
    assert resumed.config.teacher is not None


def test_teacher_computes_logprobs_of_the_completions(load: Load) -> None:
    """Only evaluations need a reward, to score completions. Without a reward, they measure only the
    divergence.
    """
    plan = make_plan(load(*DISTILL), scheduler="local")
    assert (plan.models["teacher"].head, plan.models["teacher"].trained) == ("lm", False)
    assert [call.name for call in plan.calls] == ["actor_gen", "teacher_inf", "actor_train"]
    assert {call.name for call in plan.evaluation_calls} == {
        "actor_gen",
        "reward_inf",
        "teacher_inf",
    }
    plan = make_plan(load(*DISTILL, "reward=null"), scheduler="local")
    assert [call.name for call in plan.evaluation_calls] == ["actor_gen", "teacher_inf"]


def test_teachers_and_reward_models_have_their_own_weights(load: Load) -> None:
    """Teachers and reward models never default to a copy of the actor."""
    required = "a path or an architecture is required"
    assert problems(load, "reward.name=model") == [("reward_model", required)]
    assert problems(load, DISTILL[0]) == [("teacher", required)]
    nowhere = "actor.path=trial:sums/1"
    assert problems(load, DISTILL[0], nowhere)[1:] == [("teacher", required)]
    planned = load(DISTILL[0], nowhere, planning=True)
    assert [(problem.key, problem.message) for problem in planned.missing][1:] == [
        ("teacher", required)
    ]


def test_greedy_completions_are_scored_by_the_reward_model_too(load: Load) -> None:
    plan = make_plan(load(*SCORED, "algorithm.advantage=greedy"), scheduler="local")
    calls = {call.name: call for call in plan.calls}
    assert calls["greedy_reward_model_inf"].role == "reward_model"
    assert calls["greedy_reward_model_inf"].outputs[0] in calls["greedy_reward_inf"].inputs
