"""The content of a trial's sinks, read with their libraries: steps and values of a metric."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from slurmrl.run.paths import RunPaths
from slurmrl.watch.sinks.mlflow import named
from slurmrl.watch.sinks.wandb import records

Points = list[tuple[int, float]]


def tensorboard_points(paths: RunPaths, name: str) -> Points:
    from tensorboard.backend.event_processing import event_accumulator as accumulator

    unlimited = {accumulator.SCALARS: 0}
    events = accumulator.EventAccumulator(str(paths.tensorboard), size_guidance=unlimited).Reload()
    return [(scalar.step, scalar.value) for scalar in events.Scalars(name)]


def wandb_records(paths: RunPaths, kind: str) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2
    for file in sorted(paths.wandb.glob("offline-run-*/*.wandb")):
        for raw in records(file.read_bytes()):
            record = messages.Record()
            record.ParseFromString(raw)
            if record.WhichOneof("record_type") == kind:
                yield getattr(record, kind)


def wandb_points(paths: RunPaths, name: str) -> Points:
    found = []
    for history in wandb_records(paths, "history"):
        values = {item.key or item.nested_key[0]: item.value_json for item in history.item}
        if name in values:
            found.append((history.step.num, json.loads(values[name])))
    return found


def mlflow_runs(paths: RunPaths) -> tuple[Any, list[Any]]:
    """Return the client and all runs."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(str(paths.mlflow))
    found = client.search_runs([one.experiment_id for one in client.search_experiments()])
    return client, list(found)


def mlflow_run(paths: RunPaths) -> tuple[Any, Any]:
    """Return the client and the only run."""
    client, (run,) = mlflow_runs(paths)
    return client, run


def mlflow_points(paths: RunPaths, name: str) -> Points:
    client, run = mlflow_run(paths)
    values = client.get_metric_history(run.info.run_id, name)
    return [(value.step, value.value) for value in values]


def arrived_points(paths: RunPaths, name: str) -> dict[str, Points]:
    """Return the points of evaluation trials in the sinks."""
    from tensorboard.backend.event_processing import event_accumulator as accumulator

    events = accumulator.EventAccumulator(
        str(paths.arrived_tensorboard), size_guidance={accumulator.SCALARS: 0}
    ).Reload()
    wandb = []
    for history in wandb_records(paths, "history"):
        values = {item.key or item.nested_key[0]: item.value_json for item in history.item}
        if name in values:
            wandb.append((json.loads(values["step"]), json.loads(values[name])))
    return {
        "tensorboard": [(scalar.step, scalar.value) for scalar in events.Scalars(name)],
        "wandb": wandb,
        "mlflow": mlflow_points(paths, named(name)),
    }


READERS = {
    "tensorboard": tensorboard_points,
    "wandb": wandb_points,
    "mlflow": mlflow_points,
}
ALL_SINKS = {
    "tensorboard": True,
    "wandb": {"project": "p"},
    "mlflow": {"experiment": "e"},
}
"""Settings of all sinks."""
