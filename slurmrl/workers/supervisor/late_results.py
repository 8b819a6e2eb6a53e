"""What the end of a trial that evaluates a checkpoint means to the trial that trains: its sinks get
the results (`watch.sinks.arrivals`), and it keeps the checkpoint no longer."""

from __future__ import annotations

import sys
from typing import Final

from slurmrl import child, log
from slurmrl.errors import SlurmrlError
from slurmrl.run.paths import RunPaths
from slurmrl.workers.supervisor import evaluated_checkpoints, evaluating_trials

logger = log.get(__name__)

WITHIN_S: Final = 180.0
"""Longest time that a job waits for them: for others' turns, and for servers."""


def hand_over(paths: RunPaths) -> None:
    """Let the sinks of the trial that this one evaluates have all results, or those of this one if
    others evaluate it. Raises nothing."""
    try:
        trained = evaluating_trials.subject(paths) or paths
        evaluated_checkpoints.sweep(trained)
        if not trained.evaluated().is_dir():
            return
        module = "slurmrl.watch.sinks.arrivals"
        command = [sys.executable, "-P", "-m", module, str(trained.run)]
        if child.run(command, WITHIN_S, shown=True).code is None:
            logger.warning("evaluations are not handed over: it took longer than %.0f s", WITHIN_S)
    except (SlurmrlError, OSError) as error:
        logger.warning("evaluations are not handed over: %s", error)
