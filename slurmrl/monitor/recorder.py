"""The master's metrics: ``metrics.jsonl`` always, further sinks as configured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmrl.config.schema import Logging
from slurmrl.monitor import metrics
from slurmrl.monitor.sinks import make_sinks
from slurmrl.paths import RunPaths


class MetricsRecorder:
    """Records the metrics of one incarnation, which continues after ``last_step``. Lines of later
    steps, which an earlier incarnation wrote and did not commit, are dropped; -1 drops all."""

    def __init__(self, paths: RunPaths, logging: Logging, *, last_step: int) -> None:
        metrics.cut(paths.metrics, last_step)
        self._file = metrics.MetricsWriter(paths.metrics)
        self._sinks = make_sinks(paths, logging, first_step=last_step + 1)

    def write(self, line: Mapping[str, Any]) -> None:
        """``line`` holds ``step`` and JSON values."""
        self._file.write(line)
        for sink in self._sinks:
            sink.log(line["step"], line)

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
