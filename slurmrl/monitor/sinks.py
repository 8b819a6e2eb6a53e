"""The recorder of a run's metrics, and its optional sinks. Each sink's package is imported only if
the sink is configured."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from slurmrl.config.load import load_resolved
from slurmrl.config.schema import Logging, Wandb
from slurmrl.errors import MissingDependencyError
from slurmrl.fsio import documents
from slurmrl.fsio.shapes import TEXT
from slurmrl.monitor import metrics
from slurmrl.paths import RunPaths


class Sink(Protocol):
    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Take the numbers of one step."""

    def close(self) -> None:
        """Flush and close."""


def check(logging: Logging) -> None:
    """Raise MissingDependencyError, with the command that installs it, if a configured sink's
    package is missing."""
    for package, wanted in (("tensorboard", logging.tensorboard), ("wandb", logging.wandb)):
        if wanted and importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"logging.{package} needs the package {package}: pip install {package}"
            )


def make_sinks(paths: RunPaths, logging: Logging, *, first_step: int) -> list[Sink]:
    """Return the configured sinks; ``first_step`` is the first step that will be logged.

    Raises MissingDependencyError if a package is not installed.
    """
    check(logging)
    sinks: list[Sink] = []
    if logging.tensorboard:
        sinks.append(TensorBoard(paths, first_step))
    if logging.wandb is not None:
        sinks.append(WeightsAndBiases(paths, logging.wandb))
    return sinks


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that can be plotted."""
    return {
        name: float(value)
        for name, value in values.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


class TensorBoard:
    """Writes event files in ``tensorboard/``. TensorBoard itself drops values of ``first_step`` and
    later steps from earlier event files."""

    def __init__(self, paths: RunPaths, first_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._writer = EventFileWriter(str(paths.tensorboard))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(first_step, session_log=start)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        value = self._summary.Value
        scalars = [value(tag=name, simple_value=number) for name, number in numbers(values).items()]
        self._add(step, summary=self._summary(value=scalars))

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, **content))
        self._writer.flush()


class WeightsAndBiases:
    """Logs all incarnations of a trial to one W&B run, identified by the trial's uuid."""

    def __init__(self, paths: RunPaths, settings: Wandb) -> None:
        import wandb

        self._run = wandb.init(
            project=settings.project,
            name=f"{paths.experiment}/{paths.trial}",
            id=documents.read(paths.identity, {"uuid": TEXT}, ("uuid",))["uuid"],
            config=_settings(paths),
            resume="allow",
            mode=settings.mode,
            dir=str(paths.run),
        )

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(numbers(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _settings(paths: RunPaths) -> dict[str, Any]:
    """The resolved configuration without variables of the environment, which may be secrets."""
    settings: dict[str, Any] = load_resolved(paths.config).model_dump(mode="json")
    del settings["cluster"]["env"]
    return settings


class MetricsRecorder:
    """Records the metrics of one incarnation, which continues after ``last_step``. Lines of later
    steps, which an earlier incarnation wrote and did not commit, are dropped; -1 drops all.

    Each line of the file also gets the ``time`` of its writing. Sinks keep times of their own."""

    def __init__(
        self,
        paths: RunPaths,
        logging: Logging,
        *,
        last_step: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        newest = [line["step"] for line in metrics.read_latest(paths.metrics, 1)]
        self.repeated = range(max(last_step, 0) + 1, max(newest, default=0) + 1)
        """The steps whose lines are dropped."""
        metrics.cut(paths.metrics, last_step)
        self._file = metrics.MetricsWriter(paths.metrics)
        self._clock = clock
        self._sinks = make_sinks(paths, logging, first_step=last_step + 1)

    def write(self, line: Mapping[str, Any]) -> None:
        """``line`` holds ``step`` and JSON values."""
        self._file.write({"step": line["step"], metrics.TIME: round(self._clock(), 3), **line})
        for sink in self._sinks:
            sink.log(line["step"], line)

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
