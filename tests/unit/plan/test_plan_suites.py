"""Evaluations of several held-out sets: inherited settings and rejected settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from slurmrl.config.load import dump, load
from slurmrl.config.schema import Config
from slurmrl.errors import ConfigError
from slurmrl.plan.build import make_plan
from slurmrl.plan.metric_names import known_metrics
from slurmrl.plan.settings import load_settings
from tests.unit.plan.conftest import PPO, Load

HELD_OUT = {"dataset": {"type": "prompt", "path": "held_out.jsonl"}}
HARD = {**HELD_OUT, "n": 1, "samples": 7, "greedy": True, "reward": {"name": "own:length"}}
JUDGED = {**HELD_OUT, "reward": {"parts": {"m": {"name": "model"}, "e": {"name": "exact_match"}}}}


def text(evaluation: dict[str, object]) -> str:
    values = yaml.safe_load(PPO)
    return yaml.safe_dump({**values, "evaluation": {"every_steps": 10, **evaluation}})


def suite(config: Config, name: str) -> tuple[object, ...]:
    own = config.evaluations[name]
    assert own.evaluation is not None
    assert own.reward is not None
    shown = own.evaluation
    return shown.n, shown.samples, shown.greedy, shown.pass_score, own.reward.title


def test_suite_inherits_unset_fields_from_the_evaluation(load_ppo: Load) -> None:
    suites = {"easy": HELD_OUT, "hard": HARD}
    settings = load_ppo(text=text({"n": 4, "samples": 9, "suites": suites}))
    config = settings.config
    assert suite(config, "easy") == (4, 9, False, 1.0, "exact_match")
    assert suite(config, "hard") == (1, 7, True, None, "own:length"), "its reward is not binary"
    assert config.reward is not None
    assert config.reward.title == "exact_match"
    keys = [("evaluation", "suites", name, "dataset") for name in suites]
    assert list(config.datasets()) == [("dataset",), *keys]


def test_resumed_trial_has_the_same_suites(load_ppo: Load) -> None:
    settings = load_ppo(text=text({"pass_score": 0.5, "suites": {"easy": HELD_OUT, "hard": HARD}}))
    file = settings.source.path.with_name("resolved.yaml")
    file.write_text(dump(settings.config))
    again = load_settings(file, root=file.parent / "runs").config
    assert again == settings.config
    assert suite(again, "easy")[3] == 0.5
    assert load(file).values["evaluation"]["dataset"] is None


def test_each_suite_has_its_own_calls_and_metrics(load_ppo: Load, folder: Path) -> None:
    """A reward model that only a suite uses has its place in the plan."""
    own = {**HELD_OUT, "n": 2}
    settings = load_ppo(
        f"reward_model.path={folder / 'model'}", text=text({"suites": {"a": own, "b": JUDGED}})
    )
    plan = make_plan(settings, scheduler="local")
    assert "reward_model" in plan.models
    assert plan.evaluation_calls == ()
    names = {name: [call.name for call in calls] for name, calls in plan.suite_calls.items()}
    assert names == {
        "a": ["actor_gen", "reward_inf"],
        "b": ["actor_gen", "reward_model_inf", "reward_inf"],
    }
    assert len(plan.all_calls) == len(plan.calls) + 5
    metrics = set(known_metrics(settings.config, settings.algorithm))
    assert {"eval/a/pass@2/low", "eval/a/reward", "eval/b/reward/m", "time/evaluation/b"} <= metrics
    assert not {"eval/reward", "eval/b/pass@2", "eval/a/reward/m", "reward/m"} & metrics


def test_trainers_omit_models_and_calls_of_separate_evaluation_trials(
    load_ppo: Load, folder: Path
) -> None:
    """The suite's reward model gets no GPUs in the trainers' plan, but its folder must exist."""
    evaluation = {"every_steps": None, "tasks": {}, "suites": {"b": JUDGED}}
    with pytest.raises(ConfigError, match="reward_model: is required"):
        load_ppo(text=text(evaluation))
    settings = load_ppo(f"reward_model.path={folder / 'model'}", text=text(evaluation))
    plan = make_plan(settings, scheduler="local")
    assert "reward_model" not in plan.models
    assert plan.all_calls == plan.calls
