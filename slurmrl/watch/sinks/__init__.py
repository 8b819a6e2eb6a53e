"""The recorder of a trial's metrics, and copies of them for other programs (see `feeder`).

To add a sink, add a file with ``Sink``'s methods, a line to `_wanted`, and a setting to
``logging``. Each sink's package is imported only if the sink is configured, and only where the
sinks open: the checks of a submission need neither.
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

    They begin with the steps up to ``committed`` that the sinks lack. They write as long as
    ``incarnation`` is the newest (None: no other exists).

    Raises MissingDependencyError if a package is not installed.
    """
    check(logging)
    _load(logging)
    return [
        Feeder(name, make, paths, committed=committed, check=_check_of(paths, incarnation))
        for name, make in _wanted(paths, logging)
    ]


class MetricsRecorder:
    """Records the metrics of one incarnation, which continues after ``last_step``.

    Lines of later steps, which an earlier incarnation wrote and did not commit, are dropped; -1
    drops all.

    Each line of the file also gets the ``time`` of its writing. Sinks get the lines that are
    committed, as long as ``incarnation`` is the newest (None: no other one exists).
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
        """Append a line; ``line`` has ``step`` and JSON values."""
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
        """Close the sinks.

        A later incarnation sends the lines that they could not accept within CLOSE_S.
        """
        for feeder in self._feeders:
            feeder.end()
        deadline = time.monotonic() + CLOSE_S
        for feeder in self._feeders:
            feeder.join(max(0.0, deadline - time.monotonic()))


def _load(logging: Logging) -> None:
    """Import the modules of the sinks before they use them in their threads.

    Two simultaneous imports whose modules need each other can both get incomplete modules. If a
    library cannot be imported, its sink fails and reports the failure.
    """
    from slurmrl.watch.sinks import mlflow, tensorboard, wandb

    configured = (
        (logging.tensorboard, tensorboard.load),
        (logging.wandb is not None, wandb.load),
        (logging.mlflow is not None, mlflow.load),
    )
    for wanted, load in configured:
        if wanted:
            with suppress(Exception):
                load()


def _check_of(paths: RunPaths, incarnation: int | None) -> Callable[[], object]:
    """Return a function that raises StaleIncarnationError after a newer incarnation has begun.

    Each thread has its own view of the history, which caches the records that it has read.
    """
    if incarnation is None:
        return lambda: None
    return IncarnationWriter(History(paths.history), incarnation).check


def _wanted(paths: RunPaths, logging: Logging) -> Iterator[tuple[str, Callable[[int], Sink]]]:
    """Return the names of configured sinks, with functions that open them and return a step."""
    from slurmrl.watch.sinks import mlflow, tensorboard, wandb

    if logging.tensorboard:
        yield "tensorboard", partial(tensorboard.TensorBoard, paths.tensorboard)
    if logging.wandb is not None:
        yield "wandb", partial(wandb.WeightsAndBiases, paths, logging.wandb)
    if logging.mlflow is not None:
        yield "mlflow", partial(mlflow.MLflow, paths, logging.mlflow)


def _packages(logging: Logging) -> Iterator[tuple[str, str, str]]:
    """Return setting, module and package of the configured sinks."""
    if logging.tensorboard:
        yield "tensorboard", "tensorboard", "tensorboard"
    if logging.wandb is not None:
        yield "wandb", "wandb", "wandb"
    if logging.mlflow is not None:
        yield "mlflow", "mlflow", "mlflow-skinny"
        if logging.mlflow.is_database:
            yield "mlflow.tracking_uri", "sqlalchemy", "mlflow"
