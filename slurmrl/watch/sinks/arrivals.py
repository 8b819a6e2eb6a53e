"""Results of evaluation trials, for the sinks of the trained trial.

Results arrive late: sinks may already have later steps, or the trained trial may have ended.
Therefore the batch processes of evaluation trials and of the trained trial run this command when
they end:

    python -m slurmrl.watch.sinks.arrivals RUN

The command finds all results (`run.metrics`), appends new results to ``evaluations.jsonl``, and
sends missing lines to the sinks. After a kill, the next such process completes the work. The
command is a separate process, because the libraries of sinks may hang. Only one such process works
at a time (`turn`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from slurmrl import log
from slurmrl.config.load import load_resolved
from slurmrl.config.schema import Cluster, Logging
from slurmrl.display.terminal import first_line
from slurmrl.errors import CorruptFileError, SlurmrlError
from slurmrl.fsio import atomic, calls, documents, inputs
from slurmrl.fsio.documents import COUNT, each
from slurmrl.run import metrics
from slurmrl.run.paths import RunPaths
from slurmrl.watch.sinks import mlflow, tensorboard, wandb
from slurmrl.watch.sinks.feeder import Lines

logger = log.get(__name__)

Give = Callable[[Lines, int], None]
"""Function that sends a sink the lines that it lacks. Arguments: all lines, and the number of first
lines that the sink certainly has."""
HELD = {"held": each(COUNT)}
HELD_S: Final = 60
"""Maximum number of seconds of a turn."""
GONE_S: Final = 75.0
"""Seconds without a new file after which the holder of a turn has certainly ended. The holder's
files may appear late."""
LOOK_S: Final = 0.5
ENDED: Final = ".ended"


def main() -> int:
    calls.set_private_umask()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the parent may have ignored SIGALRM
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    log.configure("evaluations")
    paths = RunPaths(Path(sys.argv[1]))
    try:
        hand_over(paths)
    except SlurmrlError as error:
        logger.warning("cannot send evaluations to the logging sinks: %s", error)
        return 1
    return 0


def hand_over(paths: RunPaths) -> None:
    """Send results to the sinks. The next call sends the lines that a failing sink has missed.

    Raises SlurmrlError.
    """
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
            except Exception as error:  # noqa: BLE001 - a sink's library must not stop the others
                reason = first_line(error) or type(error).__name__
                logger.warning("logging.%s lacks evaluations: %s", sink.split()[0], reason)
                continue
            held[sink] = len(lines)
            atomic.replace(paths.arrived_sinks, metrics.encode({"held": held}))


def _set_variables(cluster: Cluster) -> None:
    os.environ.update(cluster.env)
    if file := cluster.variables_file:
        os.environ.update(inputs.read_variables(Path(file)))


def _recorded(paths: RunPaths) -> list[dict[str, Any]]:
    """Append new lines to ``evaluations.jsonl``; return all lines of the file.

    For each step and metric, one result counts: the trial's own result, or the first that arrived.
    """
    lines = metrics.read(paths.arrived)
    known = {(line["step"], name) for line in lines for name in line}
    new = []
    for line in metrics.read_evaluated(paths):
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
    """Return the number of lines that each sink has; unlisted sinks find out the number."""
    try:
        found: dict[str, int] = documents.read(paths.arrived_sinks, HELD, HELD)["held"]
    except (FileNotFoundError, CorruptFileError):
        return {}
    return dict(found)


def _wanted(paths: RunPaths, logging: Logging) -> Iterator[tuple[str, Give]]:
    """Yield a key and the function of each configured sink.

    The key has the place of the sink, because a sink in another place has no lines yet.
    """
    if logging.tensorboard:
        folder = paths.arrived_tensorboard
        yield "tensorboard", lambda lines, held: tensorboard.write_arrived(folder, lines)
    if (to := logging.wandb) is not None:
        yield f"wandb {to.mode} {to.project}", partial(wandb.log_arrived, paths, to)
    if (into := logging.mlflow) is not None:
        place = f"mlflow {into.experiment} {into.tracking_uri or ''}"
        yield place, lambda lines, held: mlflow.log_arrived(paths, into, lines)


@contextmanager
def turn(
    folder: Path, sleep: Callable[[float], None] = time.sleep, held_s: int = HELD_S
) -> Iterator[None]:
    """Wait for the right to send evaluations to a trial's sinks; hold it during the context.

    Several evaluations may end at the same time, on any hosts. A process takes the next turn by
    exclusive creation of its file, and creates another file at its end. SIGALRM kills a holder
    after ``held_s`` seconds, so a holder without a new file for `GONE_S` has ended. Clocks of other
    machines do not matter. Raises EnvironmentFailure.
    """
    number = _taken(folder, sleep, held_s)
    try:
        yield
    finally:
        atomic.exclusive_create(folder / f"{number}{ENDED}", b"")
        signal.alarm(0)
        for name in atomic.list_names(folder):
            if _number(name) < number:
                atomic.remove(folder / name)


def _taken(folder: Path, sleep: Callable[[float], None], held_s: int) -> int:
    """Take a turn of ``held_s`` seconds; return its number."""
    atomic.make_private_directory(folder)
    waited_for, waited_s = 0, 0.0
    while True:
        names = atomic.list_names(folder)
        newest = max(map(_number, names), default=0)
        if newest != waited_for:
            waited_for, waited_s = newest, 0.0
        if not newest or f"{newest}{ENDED}" in names or waited_s >= GONE_S:
            signal.alarm(held_s)  # Set the alarm first: a suspended holder must end.
            if _created(folder, newest + 1):
                return newest + 1
            signal.alarm(0)
        sleep(LOOK_S)
        waited_s += LOOK_S


def _created(folder: Path, number: int) -> bool:
    """Take a turn; return whether the attempt succeeded.

    Since the last listing, other processes may have taken this turn and later turns, and removed
    the file of this turn.
    """
    if not atomic.exclusive_create(folder / str(number), uuid.uuid4().hex.encode()):
        return False
    if max(map(_number, atomic.list_names(folder)), default=0) <= number:
        return True
    atomic.remove(folder / str(number))
    return False


def _number(name: str) -> int:
    """Return the number of a turn's file; 0 for other files."""
    text = name.removesuffix(ENDED)
    return int(text) if text.isdecimal() else 0


if __name__ == "__main__":
    sys.exit(main())
