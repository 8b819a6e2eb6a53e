"""Evaluations of several held-out sets: what each of them inherits, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from slurmrl.config.load import dump, load
from slurmrl.config.schema import Config
from slurmrl.errors import ConfigError
from slurmrl.plan.build import make_plan
from slurmrl.plan.metrics import known_metrics
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


def test_a_suite_has_its_own_settings_and_else_those_of_the_evaluation(load_ppo: Load) -> None:
    suites = {"easy": HELD_OUT, "hard": HARD}
    settings = load_ppo(text=text({"n": 4, "samples": 9, "suites": suites}))
    config = settings.config
    assert suite(config, "easy") == (4, 9, False, 1.0, "exact_match")
    assert suite(config, "hard") == (1, 7, True, None, "own:length"), "its reward is not binary"
    assert config.reward is not None
    assert config.reward.title == "exact_match"
    keys = [("evaluation", "suites", name, "dataset") for name in suites]
    assert list(config.datasets()) == [("dataset",), *keys]


def test_a_resumed_trial_has_the_same_suites(load_ppo: Load) -> None:
    settings = load_ppo(text=text({"pass_score": 0.5, "suites": {"easy": HELD_OUT, "hard": HARD}}))
    file = settings.source.path.with_name("resolved.yaml")
    file.write_text(dump(settings.config))
    again = load_settings(file, root=file.parent / "runs").config
    assert again == settings.config
    assert suite(again, "easy")[3] == 0.5
    assert load(file).values["evaluation"]["dataset"] is None


def test_each_suite_has_its_calls_and_its_metrics(load_ppo: Load, folder: Path) -> None:
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


@pytest.mark.parametrize(
    ("evaluation", "key", "message"),
    [
        ({}, "evaluation", "needs a dataset, or suites"),
        ({**HELD_OUT, "suites": {"a": HELD_OUT}}, "evaluation", "has both dataset and suites"),
        (
            {"suites": {"a/b": HELD_OUT}},
            "evaluation.suites.a/b.[key]",
            "a suite has a name of 1 to 64",
        ),
        ({"suites": {"a": {}}}, "evaluation.suites.a.dataset", "is required"),
        ({"suites": {"a": {**HELD_OUT, "every_steps": 3}}}, "evaluation.suites.a.every_steps", ""),
        (
            {"n": 4, "suites": {"a": {**HELD_OUT, "greedy": True}}},
            "evaluation",
            "suite 'a': n 4 is not allowed with greedy",
        ),
        (
            {"suites": {"a": {"dataset": {"type": "prompt", "path": "gone.jsonl"}}}},
            "evaluation.suites.a.dataset.path",
            "there is no such file",
        ),
        (
            {"suites": {"a": {**HELD_OUT, "reward": {"name": "exact"}}}},
            "evaluation.suites.a.reward.name",
            "did you mean 'exact_match'",
        ),
        (
            {"suites": {"a": {**HELD_OUT, "samples": 1}}},
            "evaluation.suites.a.samples",
            "must be at least 2",
        ),
        (
            {"suites": {"a": {**HARD, "greedy": False, "n": 2, "vote_pattern": "#(.*)"}}},
            "evaluation.suites.a.vote_pattern",
            "not allowed without evaluation.suites.a.pass_score",
        ),
        (
            {"suites": {"a": {"dataset": {"type": "kto", "path": "held_out.jsonl"}}}},
            "evaluation.suites.a.dataset.type",
            "ppo evaluates on prompt",
        ),
    ],
)
def test_what_is_wrong_is_reported_at_its_suite(
    load_ppo: Load, evaluation: dict[str, object], key: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_ppo(text=text(evaluation))
    [problem] = caught.value.problems
    assert problem.key == key
    assert message in problem.message


def test_trainers_have_no_models_and_no_calls_of_evaluations_in_trials_of_their_own(
    load_ppo: Load, folder: Path
) -> None:
    """The reward model that the suite needs is not placed beside them, but must be there."""
    evaluation = {"every_steps": None, "tasks": {}, "suites": {"b": JUDGED}}
    with pytest.raises(ConfigError, match="reward_model: is required"):
        load_ppo(text=text(evaluation))
    settings = load_ppo(f"reward_model.path={folder / 'model'}", text=text(evaluation))
    plan = make_plan(settings, scheduler="local")
    assert "reward_model" not in plan.models
    assert plan.all_calls == plan.calls
    with pytest.raises(ConfigError, match=r"come too late for it"):
        load_ppo("stop_when=eval/b/reward >= 1", text=text(evaluation))


@pytest.mark.parametrize(
    ("tasks", "key", "message"),
    [
        ({"backend": "fsdp:x2"}, "evaluation.tasks.backend", "x2"),
        ({"backend": "sglang:d1"}, "evaluation.tasks.backend", "it is the layout of the actor"),
        ({"backend": "fsdp:t3"}, "evaluation.tasks.backend", "t3 does not divide num_attention"),
        ({"backend": "fsdp:d3"}, "evaluation.tasks.backend", "batch_size 64 must be a multiple"),
        ({"slurm": {"time": "00:01:00"}}, "evaluation.tasks.slurm", "signal_lead_s 120"),
        ({"slurm": {"partitoin": "x"}}, "evaluation.tasks.slurm.partitoin", "did you mean"),
    ],
)
def test_trials_that_could_not_be_submitted_are_refused_before_training(
    load_ppo: Load, tasks: dict[str, object], key: str, message: str
) -> None:
    evaluation = {**HELD_OUT, "every_steps": None, "tasks": tasks}
    with pytest.raises(ConfigError) as caught:
        load_ppo("cluster.slurm.signal_lead_s=120", text=text(evaluation))
    [problem] = caught.value.problems
    assert problem.key == key
    assert message in problem.message


@pytest.mark.parametrize(("backend", "refused"), [("", True), ("native:d2", False)])
def test_an_actor_that_cannot_generate_needs_an_engine_that_can(
    load_ppo: Load, backend: str, *, refused: bool
) -> None:
    """There as in training; that engine is one there, too."""
    evaluation = {**HELD_OUT, "every_steps": None, "tasks": {}}
    with pytest.raises(ConfigError) as caught:
        load_ppo(
            *("actor.backend=megatron:d2", f"rollout.backend={backend}", "rollout.greedy=true"),
            text=text(evaluation),
        )
    keys = {problem.key for problem in caught.value.problems}
    assert ("evaluation.tasks.backend" in keys) == refused


def test_names_that_the_trials_of_evaluations_could_not_have_are_refused(load_ppo: Load) -> None:
    """The step would be cut off, and all checkpoints share a trial."""
    evaluation = {"every_steps": None, "tasks": {}, "suites": {"s" * 41: HELD_OUT}}
    with pytest.raises(ConfigError) as caught:
        load_ppo(f"experiment={'e' * 60}", text=text(evaluation))
    assert [problem.key for problem in caught.value.problems] == [
        f"evaluation.suites.{'s' * 41}",
        "experiment",
    ]


def test_a_dataset_that_evaluate_cannot_measure_is_refused(load_ppo: Load) -> None:
    pairs = {"dataset": {"type": "preference", "path": "held_out.jsonl"}}
    dpo = text({**pairs, "every_steps": None, "tasks": {}}).replace("name: ppo", "name: dpo")
    with pytest.raises(ConfigError, match="'preference' is not allowed"):
        load_ppo("dataset.type=preference", "reward=", text=dpo)


@pytest.mark.parametrize("setting", ["every_steps: 3", "at_end: false", "keep_last: 2"])
def test_settings_of_evaluations_by_the_trainers_exclude_tasks(
    load_ppo: Load, setting: str
) -> None:
    name, _, value = setting.partition(": ")
    own = {**HELD_OUT, "every_steps": None, "tasks": {}, name: yaml.safe_load(value)}
    with pytest.raises(ConfigError, match=f"{name} is not allowed with tasks"):
        load_ppo(text=text(own))


def test_a_reward_that_would_judge_nothing_is_refused(load_ppo: Load) -> None:
    answers = {"dataset": {"type": "prompt_answer", "path": "held_out.jsonl"}}
    reward = {"reward": {"name": "exact_match"}}
    sft = text({"suites": {"loss": {**answers, **reward}}}).replace("name: ppo", "name: sft")
    change = ("dataset.type=prompt_answer", "reward=")
    with pytest.raises(ConfigError, match="generates nothing that it could judge"):
        load_ppo(*change, text=sft)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("eval/a/reward >= 1", ""),
        ("eval/b/pass@4 >= 1", ""),
        ("eval/reward >= 1", "no step records 'eval/reward'"),
        ("eval/a/pass@4 >= 1", "it needs evaluation.suites.a.n above 1"),
    ],
)
def test_a_condition_names_a_metric_of_a_suite(
    load_ppo: Load, condition: str, message: str
) -> None:
    written = text({"suites": {"a": HELD_OUT, "b": {**HELD_OUT, "n": 4}}})
    if not message:
        load_ppo(f"stop_when={condition}", text=written)
        return
    with pytest.raises(ConfigError) as caught:
        load_ppo(f"stop_when={condition}", text=written)
    assert any(message in problem.message for problem in caught.value.problems)
