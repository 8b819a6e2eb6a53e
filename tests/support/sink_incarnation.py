"""Incarnations that are killed while they feed sinks: ``sink_incarnation RUN PLACE...``.

Each PLACE is an incarnation of four more steps in a separate process, which has already imported
the libraries. The process records two more steps than it commits. When every sink has started, the
process kills itself at PLACE: ``kept`` (the steps are delivered, but this is not recorded),
``half`` (half of the data is delivered), or ``none``.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
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
STEPS = 4
LIBRARIES = ("mlflow.tracking", "tensorboard.summary.writer.event_file_writer", "wandb")
FLUSH_S = 0.2
PR_SET_CHILD_SUBREAPER = 36
_there = threading.Barrier(SINKS)


def die() -> NoReturn:
    _there.wait(60.0)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("alive after SIGKILL")


def take_half(kind: Any) -> None:
    """Return the first half of lines, or of their metrics."""
    log = kind.log

    def half(self: Any, lines: Any) -> None:
        log(self, lines[: len(lines) // 2])
        time.sleep(5 * FLUSH_S)  # W&B writes its file now.
        die()

    kind.log = half


def tear() -> None:
    """Let MLflow stop within a step."""

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


def feed(paths: RunPaths, base: int, place: str) -> None:
    """Continue after the commit ``base``."""
    if place == "kept":
        Feeder._write_kept = lambda self, step: die()  # type: ignore[method-assign, assignment]
    elif place == "half":
        tear()
    end = base + STEPS
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


def wait_for_services() -> None:
    """Wait for the remaining processes of a killed child, which this process has adopted.

    After the kill, W&B's process still writes its file for some moments. A new incarnation of a
    trial needs longer to start.
    """
    deadline = time.monotonic() + 60.0
    with contextlib.suppress(ChildProcessError):  # No child is left.
        while True:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                assert time.monotonic() < deadline, "waited 60 s for processes of a killed child"
                time.sleep(0.02)


def run_forked(places: Sequence[str], work: Callable[[int, str], object]) -> int:
    """Call ``work`` with the number of each place in a child process, which must end in the way of
    its place. Return the exit code of this process.
    """
    for package in LIBRARIES:
        importlib.import_module(package)  # once
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number, place in enumerate(places):
        child = os.fork()
        if child == 0:
            work(number, place)
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended != (0 if place == "none" else -signal.SIGKILL):
            print(f"{place}: ended with {ended}", file=sys.stderr)
            return 1
        wait_for_services()
    return 0


if __name__ == "__main__":
    RUN = RunPaths(Path(sys.argv[1]))
    sys.exit(run_forked(sys.argv[2:], lambda number, place: feed(RUN, number * STEPS, place)))
