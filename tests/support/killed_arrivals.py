"""Processes that pass evaluations to all sinks, each killed at another place: python -m
tests.support.killed_arrivals RUN PLACE...

Each PLACE is a separate process. The process is killed when the evaluations are ``recorded``, after
a part of the data for ``tensorboard``, ``wandb`` or ``mlflow``, or when all sinks have all data but
this is not recorded (``held``). With ``none``, the process is not killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmrl.fsio import atomic
from slurmrl.run.paths import RunPaths
from slurmrl.watch.sinks import arrivals, tensorboard
from tests.support.sink_incarnation import run_forked

FLUSH_S = 0.2


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def then_die(module: Any, name: str, when: Callable[..., bool]) -> None:
    """Kill the process after a module's next use of an atomic operation."""
    own = type(sys)("atomic")
    vars(own).update(vars(atomic))
    operation = getattr(atomic, name)

    def last(path: Path, data: bytes) -> None:
        operation(path, data)
        if when(path):
            die()

    setattr(own, name, last)
    module.atomic = own


def prepare(place: str, paths: RunPaths) -> None:
    if place == "recorded":
        then_die(arrivals, "replace", lambda path: path == paths.arrived)
    elif place == "tensorboard":
        then_die(tensorboard, "exclusive_create", lambda path: True)
    elif place == "wandb":
        from wandb.sdk.wandb_run import Run

        log = Run.log

        def one(self: Any, *arguments: Any, **options: Any) -> None:
            log(self, *arguments, **options)
            time.sleep(5 * FLUSH_S)  # W&B writes its file now.
            die()

        Run.log = one  # type: ignore[method-assign, assignment]
    elif place == "mlflow":
        from mlflow.tracking import MlflowClient

        log_batch = MlflowClient.log_batch

        def half(self: Any, run: str, metrics: Any) -> None:
            log_batch(self, run, metrics=metrics[: len(metrics) // 2])
            die()

        MlflowClient.log_batch = half  # type: ignore[method-assign, assignment]
    elif place == "held":
        give = arrivals.mlflow.log_arrived

        def all_of_it(*arguments: Any) -> None:
            give(*arguments)
            die()

        arrivals.mlflow.log_arrived = all_of_it


def hand_over(paths: RunPaths, place: str) -> None:
    prepare(place, paths)
    arrivals.hand_over(paths)


if __name__ == "__main__":
    RUN = RunPaths(Path(sys.argv[1]))
    arrivals.GONE_S = 0.0  # type: ignore[misc]
    sys.exit(run_forked(sys.argv[2:], lambda number, place: hand_over(RUN, place)))
