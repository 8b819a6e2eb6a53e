"""A reward that gives most completions no score ends the trial."""

from __future__ import annotations

import pytest

from slurmrl.errors import RewardError
from slurmrl.workers.master.results import UnscoredSteps


def test_trial_ends_if_most_scores_are_missing_in_five_steps() -> None:
    steps = UnscoredSteps()
    for share in (0.9, 0.9, 0.9, 0.9, 0.5, 1.0, 0.6, 0.6, 0.875):
        steps.add({"reward_unscored": share})
    with pytest.raises(RewardError, match="gave no score to 88% of the completions of this step"):
        steps.add({"reward_unscored": 0.875})


def test_trial_continues_if_most_completions_have_scores() -> None:
    steps = UnscoredSteps()
    for metrics in ({}, {"reward_unjudged": 1.0}, {"reward_unscored": 0.5}):
        for _ in range(10):
            steps.add(metrics)
