"""Checks of a user's reward before anything is queued: one score, and the metrics it records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurmrl.config.schema import Config, Reward
from slurmrl.config.schema.config import StopWhen
from slurmrl.data.rows import DatasetRows
from slurmrl.desk.trial_checks import Finding, Weight
from slurmrl.plan.algorithms import Algorithm
from slurmrl.plan.metric_names import known_metrics
from slurmrl.registry import describe, near
from slurmrl.rewards.weighted import WeightedReward


def score_first_row(
    reward: Reward, key: str, function: WeightedReward, rows: DatasetRows, metric: str = ""
) -> Iterator[Finding]:
    """Score the first row with its own answer as the completion.

    Only functions of the user are tried, and only if they need no tokens and no scores of models. A
    job has only the user's code, in another folder, and so does this process: a file that the code
    opens next to itself is missing in both.

    :param metric: the metric of ``stop_when`` that the reward must record, "" if none.
    """
    if not any(":" in part.name for part in reward.functions.values()):
        return
    (answer,), (prompt,) = rows.answers([0]), rows.prompts([0])
    known = {
        "finished": [True],
        "sample_ids": ["0@0"],
        "indices": [0],
        "siblings": [[answer]],
        "step": 1,
        "evaluation": False,
    }
    wanted = function.wanted()
    if not wanted <= known.keys():
        return
    (row,), place = rows.scored([0]), rows.records.where(0)
    extras = {name: known[name] for name in wanted}
    tried = f"reward '{reward.title}', tried on the first row with its answer as the completion"
    try:
        names = list(function.score([prompt], [answer], [row], [place], extras).metrics())
        if metric and function.has_stats and not any(f"/{metric}".endswith(f"/{n}") for n in names):
            found = f"{tried}: it records {', '.join(names) or 'no metrics'}, not '{metric}'"
            yield Finding("reward", Weight.WARNING, found, "stop_when")
    except FileNotFoundError as error:
        message = (
            f"{tried}: {describe(error)}; a job has only the code, in another folder: name the "
            "file by its absolute path"
        )
        yield Finding("reward", Weight.FAILED, message, key)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        yield Finding("reward", Weight.WARNING, f"{tried}: {describe(error)}", key)


def unknown_metric(config: Config, algorithm: Algorithm) -> str:
    """Return the metric of ``stop_when`` if only a user's reward can record it, else ""."""
    metric = StopWhen.parse(config.stop_when).metric if config.stop_when else ""
    return "" if metric in known_metrics(config, algorithm) else metric


def unrecorded_metric(
    metric: str, config: Config, algorithm: Algorithm, with_stats: Sequence[bool]
) -> Iterator[Finding]:
    """Check that a reward may record the metric of ``stop_when``.

    :param metric: see `unknown_metric`.
    :param with_stats: whether each reward that could be made has a method ``stats()``.
    """
    if metric and len(with_stats) == len(config.rewards()) and not any(with_stats):
        hint = near(metric, known_metrics(config, algorithm))
        message = f"no step records '{metric}', and no reward has a method stats(); {hint}"
        yield Finding("reward", Weight.FAILED, message, "stop_when")
