"""Evaluations of checkpoints by trials of their own, for the sinks of the trial that trains.

They arrive late: when later steps are in the sinks, or after the trial has ended. So the batch
process of an evaluation hands them over when it ends, and so does that of the trial that trains:

    python -m slurmrl.monitor.sinks.arrivals RUN

It looks for all results (`monitor.evaluated`), writes those that are new to the end of
``evaluations.jsonl``, and gives the sinks what they lack of its lines. So what a killed process has
left is made up for by the next one. It is a process of its own because the libraries of sinks may
hang, and it has its turn to itself (`turn`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from slurmrl import log
from slurmrl.config.load import load_resolved
from slurmrl.config.schema import Cluster, Logging
from slurmrl.errors import CorruptFileError, SlurmrlError
from slurmrl.fsio import atomic, documents, umask, variables
from slurmrl.fsio.shapes import COUNT, each
from slurmrl.monitor import evaluated, metrics
from slurmrl.monitor.sinks import mlflow, tensorboard, wandb
from slurmrl.monitor.sinks.base import Lines
from slurmrl.monitor.sinks.turn import turn
from slurmrl.paths import RunPaths

logger = log.get(__name__)

Give = Callable[[Lines, int], None]
"""Gives a sink what it lacks of all lines, of which it certainly has a number."""
HELD = {"held": each(COUNT)}


def main() -> int:
    umask.make_private()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends a turn, whatever was inherited
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    log.configure("evaluations")
    paths = RunPaths(Path(sys.argv[1]))
    try:
        hand_over(paths)
    except SlurmrlError as error:
        logger.warning("evaluations are not handed over: %s", error)
        return 1
    return 0


def hand_over(paths: RunPaths) -> None:
    """Raises SlurmrlError. A sink that fails gets its lines the next time."""
    config = load_resolved(paths.config)
    _set_variables(config.cluster)
    with turn(paths.arrived_turns):
        lines = _recorded(paths)
        held = _read_held(paths)
        for sink, give in _wanted(paths, config.logging):
            if held.get(sink, 0) >= len(lines):
                continue
            try:
                give(lines, held.get(sink, 0))
            except Exception as error:  # noqa: BLE001 - of a library that training does not need
                told = str(error).strip().partition("\n")[0] or type(error).__name__
                logger.warning("logging.%s lacks evaluations: %s", sink.split()[0], told)
                continue
            held[sink] = len(lines)
            atomic.replace(paths.arrived_sinks, metrics.encode({"held": held}))


def _set_variables(cluster: Cluster) -> None:
    os.environ.update(cluster.env)
    if file := cluster.variables_file:
        os.environ.update(variables.read(Path(file)))


def _recorded(paths: RunPaths) -> list[dict[str, Any]]:
    """All lines of the file, to which new ones are added first. A result counts once: of two about
    the same step, the one that arrived first; and the trial's own before both."""
    lines = metrics.read(paths.arrived)
    known = {(line["step"], name) for line in lines for name in line}
    new = []
    for line in evaluated.read(paths):
        step = line["step"]
        values = {name: one for name, one in line.items() if (step, name) not in known}
        if values:
            own = _own(paths, step)
            values = {name: one for name, one in values.items() if name not in own}
        if values:
            new.append({"step": step, metrics.TIME: round(time.time(), 3), **values})
    if new:
        atomic.replace(paths.arrived, b"".join(map(metrics.encode, [*lines, *new])))
    return [*lines, *new]


def _own(paths: RunPaths, step: int) -> Mapping[str, Any]:
    found = metrics.read_between(paths.metrics, step - 1, step)
    return found[0] if found else {}


def _read_held(paths: RunPaths) -> dict[str, int]:
    """Nothing without the file or with a damaged one: sinks find out what they hold."""
    try:
        found: dict[str, int] = documents.read(paths.arrived_sinks, HELD, HELD)["held"]
    except (FileNotFoundError, CorruptFileError):
        return {}
    return dict(found)


def _wanted(paths: RunPaths, logging: Logging) -> Iterator[tuple[str, Give]]:
    """The configured sinks by name and place: another place has nothing yet."""
    if logging.tensorboard:
        folder = paths.arrived_tensorboard
        yield "tensorboard", lambda lines, held: tensorboard.write_arrived(folder, lines)
    if (to := logging.wandb) is not None:
        yield f"wandb {to.mode} {to.project}", partial(wandb.log_arrived, paths, to)
    if (into := logging.mlflow) is not None:
        place = f"mlflow {into.experiment} {into.tracking_uri or ''}"
        yield place, lambda lines, held: mlflow.log_arrived(paths, into, lines)


if __name__ == "__main__":
    sys.exit(main())
