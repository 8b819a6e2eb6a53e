"""MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmrl.config.schema import Mlflow
from slurmrl.config.source import flat
from slurmrl.errors import EnvironmentFailure
from slurmrl.run.metrics import TIME
from slurmrl.run.paths import RunPaths
from slurmrl.watch.sinks.feeder import Lines, numbers, settings, uuid

TRIAL_TAG = "slurmrl.uuid"
METRICS_PER_REQUEST = 1000
PARAMETERS_PER_REQUEST = 100
"""The server's limits."""
PARAMETER_CHARACTERS = 6000


class MLflow:
    """Logs all incarnations of a trial to one MLflow run, found by a tag with the trial's uuid.

    A kill may leave a step incomplete, and MLflow keeps duplicates, so values that the run already
    has are not sent again.
    """

    def __init__(self, paths: RunPaths, wanted: Mlflow, after: int) -> None:
        self._client = _client(wanted, paths)
        self.last = after
        """The step after which the sink continues; -1 for a new run, which has no values."""
        self._run = self._found(wanted.experiment, paths)
        self._seen = _values_after(self._client, self._run, self.last)

    @property
    def kept(self) -> int:
        return self.last

    def log(self, lines: Lines) -> None:
        _log_metrics(self._client, self._run, lines, self._seen)
        self.last = lines[-1]["step"]

    def close(self) -> None:
        self._client.set_terminated(self._run)

    def _found(self, experiment: str, paths: RunPaths) -> str:
        """Return the id of the trial's run. Set the run to running, and log the settings."""
        client = self._client
        run = _find(client, experiment, paths)
        if run is not None:
            client.update_run(run.info.run_id, status="RUNNING")
        else:
            name = paths.full_name
            known = client.get_experiment_by_name(experiment)
            at = client.create_experiment(experiment) if known is None else known.experiment_id
            run = client.create_run(at, tags={TRIAL_TAG: uuid(paths)}, run_name=name)
            self.last = -1
        self._log_settings(run, settings(paths))
        return str(run.info.run_id)

    def _log_settings(self, run: Any, values: dict[str, Any]) -> None:
        """Log settings as parameters. MLflow never changes the first value of a parameter."""
        from mlflow.entities import Param

        new = [
            Param(named(name), str(value)[:PARAMETER_CHARACTERS])
            for name, value in flat(values).items()
            if value not in (None, {}) and named(name) not in run.data.params
        ]
        for some in _parts(new, PARAMETERS_PER_REQUEST):
            self._client.log_batch(run.info.run_id, params=some)


def log_arrived(paths: RunPaths, wanted: Mlflow, lines: Lines) -> None:
    """Log the values of ``lines`` that the trial's run lacks, at their steps.

    Raises EnvironmentFailure if the trial has no run yet, because only its own process creates it.
    """
    client = _client(wanted, paths)
    run = _find(client, wanted.experiment, paths)
    if run is None:
        raise EnvironmentFailure(f"experiment {wanted.experiment} has no run of the trial yet")
    names = {named(name) for line in lines for name in line}
    seen = _values_after(client, run.info.run_id, -1, names)
    _log_metrics(client, run.info.run_id, lines, seen)


def load() -> None:
    """Import the library with telemetry disabled. The library reads its variable once."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow.tracking  # noqa: F401


def _client(wanted: Mlflow, paths: RunPaths) -> Any:
    load()
    uri = wanted.tracking_uri or str(paths.mlflow)
    if Path(uri.removeprefix("file://")).is_absolute():
        # MLflow prefers a database, which does not work well on a shared file system.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    return MlflowClient(uri, registry_uri=uri)


def _find(client: Any, experiment: str, paths: RunPaths) -> Any:
    """Return the trial's run; None before it is created."""
    known = client.get_experiment_by_name(experiment)
    if known is None:
        return None
    of_trial = f"tags.`{TRIAL_TAG}` = '{uuid(paths)}'"
    runs = client.search_runs([known.experiment_id], of_trial, max_results=1)
    return runs[0] if runs else None


def _log_metrics(client: Any, run: str, lines: Lines, seen: set[tuple[int, str]]) -> None:
    from mlflow.entities import Metric

    new = [
        Metric(named(name), value, _milliseconds(line), line["step"])
        for line in lines
        for name, value in numbers(line).items()
        if (line["step"], named(name)) not in seen
    ]
    for some in _parts(new, METRICS_PER_REQUEST):
        client.log_batch(run, metrics=some)


def _values_after(
    client: Any, run: str, step: int, names: Container[str] | None = None
) -> set[tuple[int, str]]:
    """Return the step and the name of each value after ``step``; ``names`` None means all names."""
    return {
        (value.step, name)
        for name in client.get_run(run).data.metrics
        if names is None or name in names
        for value in client.get_metric_history(run, name)
        if value.step > step
    }


def named(name: str) -> str:
    """Return a name that MLflow accepts.

    MLflow uses names as paths, so ``reward`` and ``reward/math`` could not both exist.
    """
    return re.sub(r"[^\w.\- :]", "_", name.replace("@", "_at_").replace("/", "."))


def _milliseconds(line: Mapping[str, Any]) -> int:
    return int(line.get(TIME, time.time()) * 1000)


def _parts(values: list[Any], most: int) -> Iterator[list[Any]]:
    return (values[at : at + most] for at in range(0, len(values), most))
