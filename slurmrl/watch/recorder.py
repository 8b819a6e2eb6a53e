"""The recorder of a run's metrics: ``metrics.jsonl``, and the sinks that follow it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from slurmrl.config.schema import Logging
from slurmrl.run import metrics
from slurmrl.run.paths import RunPaths
from slurmrl.watch.sinks import make_feeders

CLOSE_S = 10.0
"""How long the sinks have to close when a job ends."""


class MetricsRecorder:
    """Records the metrics of one incarnation, which continues after ``last_step``. Lines of later
    steps, which an earlier incarnation wrote and did not commit, are dropped; -1 drops all.

    Each line of the file also gets the ``time`` of its writing. Sinks get the lines that are
    committed, as long as ``incarnation`` is the newest (None: no other one exists)."""

    def __init__(
        self,
        paths: RunPaths,
        logging: Logging,
        *,
        last_step: int,
        incarnation: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        newest = [line["step"] for line in metrics.read_latest(paths.metrics, 1)]
        self.repeated = range(max(last_step, 0) + 1, max(newest, default=0) + 1)
        """The steps whose lines are dropped."""
        metrics.cut(paths.metrics, last_step)
        self._file = metrics.MetricsWriter(paths.metrics)
        self._clock = clock
        self._feeders = make_feeders(paths, logging, committed=last_step, incarnation=incarnation)

    def write(self, line: Mapping[str, Any]) -> None:
        """``line`` holds ``step`` and JSON values."""
        self._file.write({"step": line["step"], metrics.TIME: round(self._clock(), 3), **line})

    def sync(self) -> None:
        self._file.sync()

    def committed(self, step: int) -> None:
        """Let the sinks have the steps up to a commit, without waiting for them."""
        for feeder in self._feeders:
            feeder.committed(step)

    @property
    def behind(self) -> list[str]:
        """Names of the sinks that lack committed steps."""
        return [feeder.name for feeder in self._feeders if feeder.is_behind]

    def close(self) -> None:
        """Close the sinks; what they could not take within CLOSE_S, a later incarnation hands
        over."""
        for feeder in self._feeders:
            feeder.end()
        deadline = time.monotonic() + CLOSE_S
        for feeder in self._feeders:
            feeder.join(max(0.0, deadline - time.monotonic()))
