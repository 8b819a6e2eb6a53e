"""One incarnation that feeds all sinks, and is killed while they take steps.

    python -m tests.support.sink_incarnation RUN BASE END PLACE

BASE is the last commit; steps are recorded up to END + 2 and committed up to END. PLACE is where
the process kills itself, once every sink is there: ``kept`` (the steps are taken, which is not
written down), ``half`` (half of what is handed over was taken), or ``none``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from slurmrl.config.load import load_resolved
from slurmrl.run.paths import RunPaths
from slurmrl.watch.sinks import MetricsRecorder
from slurmrl.watch.sinks.feeder import Feeder
from slurmrl.watch.sinks.mlflow import MLflow
from slurmrl.watch.sinks.tensorboard import TensorBoard
from slurmrl.watch.sinks.wandb import WeightsAndBiases

SINKS = 3
FLUSH_S = 0.2
_there = threading.Barrier(SINKS)


def die() -> NoReturn:
    _there.wait(60.0)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("alive after SIGKILL")


def take_half(kind: Any) -> None:
    """Lines, or metrics of the lines, up to the middle."""
    log = kind.log

    def half(self: Any, lines: Any) -> None:
        log(self, lines[: len(lines) // 2])
        time.sleep(5 * FLUSH_S)  # W&B writes its file meanwhile
        die()

    kind.log = half


def tear() -> None:
    """MLflow stops within a step."""

    opened = MLflow.__init__

    def open_torn(self: MLflow, *arguments: Any) -> None:
        opened(self, *arguments)
        log_batch = self._client.log_batch

        def log_some(run: str, metrics: list[Any]) -> None:
            log_batch(run, metrics=metrics[: len(metrics) // 2])
            die()

        self._client.log_batch = log_some

    MLflow.__init__ = open_torn  # type: ignore[method-assign, assignment]
    take_half(TensorBoard)
    take_half(WeightsAndBiases)


def main() -> None:
    run, base, end, place = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    if place == "kept":
        Feeder._write_kept = lambda self, step: die()  # type: ignore[method-assign, assignment]
    elif place == "half":
        tear()
    paths = RunPaths(run)
    recorder = MetricsRecorder(paths, load_resolved(paths.config).logging, last_step=base)
    for step in range(base + 1, end + 3):
        line = {"step": step, "reward": step / 8 if step <= end else -1.0, "reward/math": step}
        if step % 4 == 0:
            line |= {"eval/pass@1": step / 16, "eval/reward/low": 0.5}
        recorder.write(line)
    recorder.committed(end)
    deadline = time.monotonic() + 120.0
    while recorder.behind:
        assert time.monotonic() < deadline, f"waited 120 s for {recorder.behind}"
        time.sleep(0.02)
    recorder.close()


if __name__ == "__main__":
    main()
