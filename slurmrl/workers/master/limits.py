"""Advice for jobs that reach their time limit before the first commit."""

from __future__ import annotations

from slurmrl.config.schema import Config
from slurmrl.history.log import History
from slurmrl.history.state import fold
from slurmrl.monitor import events, metrics
from slurmrl.paths import RunPaths
from slurmrl.workers.master.judgement import Ending


def explain(paths: RunPaths, config: Config, ending: Ending) -> str:
    """Return how far the incarnation came and which settings to change."""
    ready_s = next(
        (
            event["seconds"]
            for event in events.read_all(paths)
            if event["kind"] == "ready"
            and event["writer"] == f"master.{ending.incarnation}"
            and isinstance(event.get("seconds"), int | float)
        ),
        None,
    )
    slurm = config.cluster.slurm
    if ready_s is None:
        came = "the models were not even loaded"
    else:
        came = f"starting and loading took {ready_s:.0f} s, and {_finished(paths)}"
    limit = f"cluster.slurm.time ({slurm.time})" if slurm.time else "cluster.slurm.time"
    return (
        f"{came}. One step must fit between loading and the warning, and one more with its commit "
        f"into the {slurm.signal_lead_s} s between the warning and the limit: raise {limit} or "
        "cluster.slurm.signal_lead_s, commit more often (checkpoint.every_steps), or make steps "
        "shorter"
    )


def _finished(paths: RunPaths) -> str:
    """Count the steps since the last commit, which the next incarnation has not discarded yet."""
    commit = fold(History(paths.history).read()).last_commit
    newest = metrics.newest(metrics.read_latest(paths.metrics, 1)).get("step", 0)
    steps = int(newest) - (commit.step if commit is not None else 0)
    if steps <= 0:
        return "no step was finished in the remaining time"
    return f"{steps} steps were finished, but none was committed"
