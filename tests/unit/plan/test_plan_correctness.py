"""Tests of the default score of a correct completion."""

from __future__ import annotations

import pytest

from slurmrl.plan.metric_names import known_metrics
from slurmrl.plan.settings import Settings
from tests.unit.plan.conftest import Load

SEVERAL = "evaluation.n=4"
PARTS = "reward={{parts: {{a: {{name: math{}}}, b: {{name: {}}}}}}}"
TOOLS = "rollout.episode={name: multi_turn, environment: {name: tools}, tools: {calculator: {}}}"
GAME = "rollout.episode={name: multi_turn, environment: {name: guess_number}}"


@pytest.mark.parametrize(
    "reward",
    [
        "reward.name=exact_match",
        "reward.name=math",
        "reward.name=code",
        "reward={name: code, options: {score: all}}",
        PARTS.format(", where: {set: x}", "code, where: {set: [y, z]}"),
        PARTS.format("", "'own:length', weight: 0"),
        TOOLS,
    ],
)
def test_score_of_1_is_correct_if_scores_are_1_or_0(load_ppo: Load, reward: str) -> None:
    """The run's configuration contains the default, and its metrics include the rates."""
    settings = load_ppo(SEVERAL, reward)
    assert settings.config.evaluation is not None
    assert settings.config.evaluation.pass_score == 1.0
    assert {"eval/pass@1", "eval/maj@4/low"} <= set(_metrics(settings))
    assert settings.notes == ()


@pytest.mark.parametrize(
    "reward",
    [
        "reward.name=own:length",
        "reward={name: code, options: {score: share}}",
        PARTS.format("", "exact_match"),
        PARTS.format(", where: {set: x}", "code, where: {set: [x, z]}"),
        PARTS.format(", where: {set: x}", "code, where: {kind: y}"),
        PARTS.format(", weight: 0.5", "code, weight: 0"),
        PARTS.format(", weight: 0", "'own:length', weight: 0"),
        GAME,
    ],
)
def test_other_scores_have_rates_only_with_pass_score(load_ppo: Load, reward: str) -> None:
    """If scores are never 1, a rate would always be 0. One message names the setting."""
    settings = load_ppo(SEVERAL, reward)
    assert settings.config.evaluation is not None
    assert settings.config.evaluation.pass_score is None
    assert not [name for name in _metrics(settings) if "@" in name]
    [note] = settings.notes
    assert note.startswith("no pass@k or maj@k: reward '")
    assert "set evaluation.pass_score to the minimum score" in note
    settings = load_ppo(SEVERAL, reward, "evaluation.pass_score=0.25")
    assert settings.config.evaluation is not None
    assert settings.config.evaluation.pass_score == 0.25
    assert "eval/pass@2" in _metrics(settings)
    assert settings.notes == ()


def test_single_completion_gives_no_note(load_ppo: Load) -> None:
    assert load_ppo("reward.name=own:length").notes == ()


def test_offline_evaluation_has_the_same_pass_score_default(load_ppo: Load) -> None:
    """The estimates include the rates if the scores show which completions are correct."""
    whole = ("algorithm={name: evaluate, batch_size: 8}", "evaluation=null", "total_steps=null")
    records = [{"id": "a", "completions": [{"text": "x", "reward": 0.5}] * 2}]
    for more, expected in [
        (("reward.name=exact_match",), {"avg@2", "pass@1", "pass@2", "maj@2"}),
        (("reward.name=own:length",), {"avg@2"}),
    ]:
        settings = load_ppo(*whole, "rollout.n=2", *more)
        summary = settings.algorithm.summarize(settings.config, records)
        assert summary is not None
        assert set(summary.estimates) == expected
        assert summary.scores[0].keys() == {"id", "rewards", *expected}
        assert len(settings.notes) == (len(expected) == 1)


def _metrics(settings: Settings) -> list[str]:
    return known_metrics(settings.config, settings.algorithm)


ACTOR = "actor.optimizer"


@pytest.mark.parametrize(
    ("overrides", "notes"),
    [
        (("total_steps=4", "actor.optimizer.warmup_steps=9"), ["actor"]),
        (("total_steps=4", "actor.optimizer.warmup_steps=8"), []),
        (("total_steps=4", "critic.optimizer.warmup_steps=100"), ["critic"]),
        (("total_steps=4", "ref.optimizer.warmup_steps=100"), []),
        (
            ("total_steps=5", "algorithm.critic_warmup_steps=1", f"{ACTOR}.warmup_steps=9"),
            ["actor"],
        ),
        ((f"{ACTOR}.warmup_steps=9", f"{ACTOR}.schedule_steps=9"), []),
    ],
)
def test_unreached_part_of_a_learning_rate_schedule_gives_a_note(
    load_ppo: Load, overrides: tuple[str, ...], notes: list[str]
) -> None:
    settings = load_ppo("algorithm.n_minibatches=2", "algorithm.batch_size=8", *overrides)
    found = [note for note in settings.notes if "warmup_steps" in note]
    assert [note.partition(".")[0] for note in found] == notes
    assert all("more than the 8 optimizer steps of the run" in note for note in found)


def test_schedule_within_the_warm_up_gives_a_note(load_ppo: Load) -> None:
    settings = load_ppo(
        *(f"{ACTOR}.{key}" for key in ("warmup_steps=3", "schedule_steps=3", "schedule=linear"))
    )
    (found,) = (note for note in settings.notes if "warmup_steps" in note)
    assert found == (
        "actor.optimizer.schedule_steps 3 is not above the warm-up, after which the learning rate "
        "falls to its minimum (warmup_steps 3)"
    )
