"""What the end of a trial that evaluates a checkpoint means to the trial that trains: its sinks get
the results (`watch.sinks.arrivals`), and it keeps the checkpoint no longer."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from typing import Final

from slurmrl import log
from slurmrl.errors import SlurmrlError
from slurmrl.run.paths import RunPaths
from slurmrl.workers.supervisor import evaluated_checkpoints, evaluating_trials

logger = log.get(__name__)

WITHIN_S: Final = 180.0
"""Longest time that a job waits for them: for others' turns, and for servers."""
KILLED_S: Final = 5.0
"""How long a killed process may take to end."""


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
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    except (SlurmrlError, OSError) as error:
        logger.warning("evaluations are not handed over: %s", error)
        return
    try:
        process.wait(WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        logger.warning("evaluations are not handed over: it took longer than %.0f s", WITHIN_S)
        with suppress(subprocess.TimeoutExpired):  # in a call that a file system never ends
            process.wait(KILLED_S)
