"""Names of the metrics that steps and evaluations record."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from slurmrl.config.schema import WHOLE, Config
from slurmrl.plan.algorithms import Algorithm
from slurmrl.plan.dataflow import Call, Method
from slurmrl.plan.precision import rounds_to

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
"""Metrics of the groups of a step."""
WAITED_S: Final = "rollout/waited_s"
"""Seconds that the trainers waited for the groups of a step."""
SCORED_BY_TASKS: Final = "rollout/judged"
"""The share of the completions of a step whose rewards come from tasks."""
UNSCORED: Final = "reward_unscored"
"""The share of completions without a score, if the reward may return none."""
ROLLOUT_METRICS: Final = (*ROLLOUT_SUMS, STALENESS_MEAN, STALENESS_MAX, WAITED_S, SCORED_BY_TASKS)
"""Metrics of trials with rollout tasks."""
UPDATE_KEPT: Final = "update_kept"
"""The share of the actor's update that the weights in the type of generation have."""
EVALUATION_S: Final = "time/evaluation"
"""Seconds of a whole evaluation; with ``/<suite>`` of one suite."""


RATES: Final = re.compile(r"eval/([^/]+/)?(pass|maj)@")
"""The metrics that evaluations of several completions report."""


def evaluation_metric(suite: str) -> str:
    """Prefix of the names of the metrics of a suite's evaluation."""
    return "eval/" if suite == WHOLE else f"eval/{suite}/"


def known_metrics(config: Config, algorithm: Algorithm) -> list[str]:
    """The metrics that lines of ``metrics.jsonl`` can have; a user's own reward may add more."""
    calls = algorithm.calls(config)
    parts = _part_metrics(config)
    names = {"step", "epoch", *STEP_METRICS, "rows_left_out", "time/total", "time/checkpoint_stall"}
    names |= {f"time/{call.name}" for call in calls} | {"time/step"}
    names |= {name for call in calls for name in call.metrics}
    names |= parts if makes_rewards(calls) else set()
    names |= set(ROLLOUT_METRICS) if config.rollout.tasks is not None else set()
    names |= {UPDATE_KEPT} if rounds_to(config) and generates(calls) else set()
    for suite, own in config.evaluations.items():
        evaluation_calls = algorithm.evaluation_calls(own)
        measured = {name for call in evaluation_calls for name in call.metrics}
        measured |= _part_metrics(own) if makes_rewards(evaluation_calls) else set()
        measures = algorithm.evaluation_measures(own)
        measured |= {f"{name}{end}" for name in measures for end in ("", "/low", "/high")}
        prefix = evaluation_metric(suite)
        names |= {f"{prefix}{name}" for name in measured | set(STEP_METRICS)} | {EVALUATION_S}
        names |= set() if suite == WHOLE else {f"{EVALUATION_S}/{suite}"}
    return sorted(names)


def _part_metrics(config: Config) -> set[str]:
    return {f"reward/{name}" for name in config.reward.parts} if config.reward else set()


def generates(calls: Sequence[Call]) -> bool:
    return any(call.method is Method.GENERATE for call in calls)


def makes_rewards(calls: Sequence[Call]) -> bool:
    return any("rewards" in call.outputs for call in calls)
