"""Names of the metrics that steps and evaluations record."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from slurmrl.config.schema import WHOLE, Config
from slurmrl.plan.algorithms import Algorithm
from slurmrl.plan.dataflow import Call, Method
from slurmrl.plan.precision import rounds_to

STEP_METRICS: Final = ("tokens", "tokens_per_s")
ROLLOUT_SUMS: Final = (
    *("rollout/refused_late", "rollout/refused_rolled_back", "rollout/dropped_stale"),
    *("rollout/damaged", "rollout/aborted", "rollout/given_back", "rollout/lost"),
)
"""Metrics that count groups of completions since the last step."""
STALENESS_MEAN: Final = "rollout/staleness_mean"
STALENESS_MAX: Final = "rollout/staleness_max"
"""Metrics of the staleness of the groups in a step."""
WAITED_S: Final = "rollout/waited_s"
"""Metric: seconds that the trainers waited for the groups of a step."""
SCORED_BY_TASKS: Final = "rollout/judged"
"""Metric: share of a step's completions whose rewards come from rollout tasks."""
UNSCORED: Final = "reward_unscored"
"""Metric: share of completions without a score."""
ROLLOUT_METRICS: Final = (*ROLLOUT_SUMS, STALENESS_MEAN, STALENESS_MAX, WAITED_S, SCORED_BY_TASKS)
"""Metrics of trials with rollout tasks."""
UPDATE_KEPT: Final = "update_kept"
"""Metric: share of the actor's update that survives rounding to the type of generation."""
EVALUATION_S: Final = "time/evaluation"
"""Metric: seconds of an evaluation, or of one suite with the suffix ``/<suite>``."""


RATES: Final = re.compile(r"eval/([^/]+/)?(pass|maj)@")
"""Pattern of metrics that only evaluations with several completions report."""


def evaluation_metric(suite: str) -> str:
    """Return the prefix of the names of a suite's metrics."""
    return "eval/" if suite == WHOLE else f"eval/{suite}/"


def known_metrics(config: Config, algorithm: Algorithm) -> list[str]:
    """Return the metrics that ``metrics.jsonl`` can have, except metrics of the user's reward."""
    calls = algorithm.calls(config)
    names = {"step", "epoch", *STEP_METRICS, "rows_left_out", "time/total", "time/checkpoint_stall"}
    names |= {f"time/{call.name}" for call in calls} | {"time/step"}
    names |= _of_calls(config, calls)
    names |= set(ROLLOUT_METRICS) if config.rollout.tasks is not None else set()
    names |= {UPDATE_KEPT} if rounds_to(config) and generates(calls) else set()
    for suite, own in config.evaluations.items():
        measured = _of_calls(own, algorithm.evaluation_calls(own))
        measures = algorithm.evaluation_measures(own)
        measured |= {f"{name}{end}" for name in measures for end in ("", "/low", "/high")}
        prefix = evaluation_metric(suite)
        names |= {f"{prefix}{name}" for name in measured | set(STEP_METRICS)} | {EVALUATION_S}
        names |= set() if suite == WHOLE else {f"{EVALUATION_S}/{suite}"}
    return sorted(names)


def misnamed(recorded: Iterable[str], config: Config, algorithm: Algorithm) -> str:
    """Return why a reward must not record these metrics in its ``stats()``; "" if it may."""
    own = {"time", *known_metrics(config, algorithm)} - {"reward_unjudged"}
    taken = sorted(own.intersection(recorded))
    return f"stats() returned {taken[0]}, a metric of slurmrl; use another name" if taken else ""


def _of_calls(config: Config, calls: Sequence[Call]) -> set[str]:
    """Return the metrics of calls, and of the reward's parts if the calls make rewards."""
    parts = config.reward.parts if config.reward and makes_rewards(calls) else ()
    return {name for call in calls for name in call.metrics} | {f"reward/{name}" for name in parts}


def generates(calls: Sequence[Call]) -> bool:
    return any(call.method is Method.GENERATE for call in calls)


def makes_rewards(calls: Sequence[Call]) -> bool:
    return any("rewards" in call.outputs for call in calls)
