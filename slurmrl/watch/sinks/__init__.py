"""The recorder of a trial's metrics, and its sinks, which are copies for other programs.

To add a sink, add a file with the methods of `Sink`, a line to `_wanted`, and a setting to
``logging``. Import a sink's package only if the sink is configured, and only where it is opened,
because a login node may lack the package.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from slurmrl.config.schema import Logging
from slurmrl.errors import MissingDependencyError
from slurmrl.run import metrics
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import IncarnationWriter
from slurmrl.run.paths import RunPaths
from slurmrl.watch.sinks.feeder import Feeder, Sink

CLOSE_S = 10.0
"""Seconds in which sinks must close when a job ends."""


def check(logging: Logging) -> None:
    """Raise MissingDependencyError if a configured sink's package is missing.

    The error has the command that installs it.
    """
    for setting, module, package in _packages(logging):
        if importlib.util.find_spec(module) is None:
            raise MissingDependencyError(
                f"logging.{setting} needs the package {package}: pip install {package}"
            )


def make_feeders(
    paths: RunPaths, logging: Logging, *, committed: int, incarnation: int | None
) -> list[Feeder]:
    """Return the feeders of the configured sinks.

    The feeders begin with the steps up to ``committed`` that the sinks lack. Feeders stop when
    ``incarnation`` is no longer the newest; None means a trial without incarnations.

    Raises MissingDependencyError if a package is not installed.
    """
    check(logging)
    wanted = list(_wanted(paths, logging))
    for _, load, _ in wanted:
        # Simultaneous imports in the threads of sinks could get incomplete modules. A sink whose
        # library cannot be imported fails later and reports the failure.
        with suppress(Exception):
            load()
    return [
        Feeder(name, make, paths, committed=committed, check=_check_of(paths, incarnation))
        for name, _, make in wanted
    ]


class MetricsRecorder:
    """Records the metrics of one incarnation, which continues after ``last_step``.

    The recorder drops lines of later steps, which an earlier incarnation wrote but did not commit;
    -1 drops all lines. Each new line gets the ``time`` of writing. Sinks get the committed lines as
    long as ``incarnation`` is the newest; None means a trial without incarnations.
    """

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
        """The steps whose lines are dropped, because they will be repeated."""
        metrics.cut(paths.metrics, last_step)
        self._file = metrics.MetricsWriter(paths.metrics)
        self._clock = clock
        self._feeders = make_feeders(paths, logging, committed=last_step, incarnation=incarnation)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line with a ``step`` and JSON values."""
        self._file.write({"step": line["step"], metrics.TIME: round(self._clock(), 3), **line})

    def sync(self) -> None:
        self._file.sync()

    def committed(self, step: int) -> None:
        """Release the steps up to a commit to the sinks, without waiting for the sinks."""
        for feeder in self._feeders:
            feeder.committed(step)

    @property
    def behind(self) -> list[str]:
        """Names of the sinks that lack committed steps."""
        return [feeder.name for feeder in self._feeders if feeder.is_behind]

    def close(self) -> None:
        """Close the sinks within CLOSE_S seconds.

        A later incarnation sends the lines that the sinks have not accepted.
        """
        for feeder in self._feeders:
            feeder.end()
        deadline = time.monotonic() + CLOSE_S
        for feeder in self._feeders:
            feeder.join(max(0.0, deadline - time.monotonic()))


def _check_of(paths: RunPaths, incarnation: int | None) -> Callable[[], object]:
    """Return a function that raises StaleIncarnationError after a newer incarnation has begun.

    Each thread needs a separate function, because the function caches records that it has read.
    """
    if incarnation is None:
        return lambda: None
    return IncarnationWriter(History(paths.history), incarnation).check


def _wanted(
    paths: RunPaths, logging: Logging
) -> Iterator[tuple[str, Callable[[], None], Callable[[int], Sink]]]:
    """Yield, for each sink: name, function that imports its library, function that opens it."""
    from slurmrl.watch.sinks import mlflow, tensorboard, wandb

    if logging.tensorboard:
        folder = paths.tensorboard
        yield "tensorboard", tensorboard.load, partial(tensorboard.TensorBoard, folder)
    if logging.wandb is not None:
        yield "wandb", wandb.load, partial(wandb.WeightsAndBiases, paths, logging.wandb)
    if logging.mlflow is not None:
        yield "mlflow", mlflow.load, partial(mlflow.MLflow, paths, logging.mlflow)


def _packages(logging: Logging) -> Iterator[tuple[str, str, str]]:
    """Yield setting, module and package of each library that the configured sinks need."""
    if logging.tensorboard:
        yield "tensorboard", "tensorboard", "tensorboard"
    if logging.wandb is not None:
        yield "wandb", "wandb", "wandb"
    if logging.mlflow is not None:
        yield "mlflow", "mlflow", "mlflow-skinny"
        if logging.mlflow.is_database:
            yield "mlflow.tracking_uri", "sqlalchemy", "mlflow"
