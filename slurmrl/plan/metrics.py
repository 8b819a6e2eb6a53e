"""Names of metrics beside those that the calls of an algorithm declare."""

from __future__ import annotations

from typing import Final

from slurmrl.config.schema import WHOLE

STEP_METRICS: Final = ("tokens", "tokens_per_s")
ROLLOUT_SUMS: Final = (
    "rollout/refused_late",
    "rollout/refused_rolled_back",
    "rollout/dropped_stale",
    "rollout/damaged",
    "rollout/aborted",
    "rollout/given_back",
    "rollout/lost",
)
"""Groups since the last step."""
STALENESS_MEAN: Final = "rollout/staleness_mean"
STALENESS_MAX: Final = "rollout/staleness_max"
"""Of the groups of a step."""
WAITED_S: Final = "rollout/waited_s"
"""For the groups of a step."""
JUDGED: Final = "rollout/judged"
"""The share of the completions of a step whose rewards come from tasks."""
UNSCORED: Final = "reward_unscored"
"""The share of completions to which the reward gave no score, where it may do so."""
ROLLOUT_METRICS: Final = (*ROLLOUT_SUMS, STALENESS_MEAN, STALENESS_MAX, WAITED_S, JUDGED)
"""Of trials with rollout tasks."""
UPDATE_KEPT: Final = "update_kept"
"""The share of the actor's update that the weights in the type of generation have."""
EVALUATION_S: Final = "time/evaluation"
"""Of a whole evaluation; with ``/<suite>`` of one of its suites."""


def evaluation_metric(suite: str) -> str:
    """What the names of the metrics of a suite's evaluation begin with."""
    return "eval/" if suite == WHOLE else f"eval/{suite}/"
