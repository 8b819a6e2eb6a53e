"""Scenarios: the control log of each incarnation, its readers, and its removal."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from slurmrl.errors import EnvironmentFailure, StaleIncarnationError
from slurmrl.fsio.atomic import make_private_directory
from slurmrl.run.channel.message_log import LogReader, LogWriter
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import begin, fold
from slurmrl.run.paths import RunPaths
from slurmrl.workers.master.__main__ import _clean
from tests.support.chaos.schedule import Event, Scenario, ViolationError
from tests.support.chaos.stepping import Note

BATCHES = 4
PADDING = "y" * 500
SEGMENT_BYTES = 2000
"""Small, so that the log continues in a second file."""


def setup(folder: Path) -> None:
    paths = RunPaths(folder)
    for directory in (paths.history, paths.control, paths.checkpoints):
        make_private_directory(directory)


def master(folder: Path, me: int, note: Note) -> None:
    """Post batches of two messages until there is a newer incarnation. The master detects the newer
    incarnation no later than at its next read of the history.
    """
    paths = RunPaths(folder)
    writer = begin(History(paths.history), {"by": me})
    incarnation = writer.incarnation
    note(event="began", incarnation=incarnation)
    try:
        _clean(paths, fold(History(paths.history).read()))
        log = LogWriter(paths.master_log(incarnation), segment_bytes=SEGMENT_BYTES)
        for batch in range(BATCHES):
            numbers = [2 * batch, 2 * batch + 1]
            posted = [{"incarnation": incarnation, "seq": n, "padding": PADDING} for n in numbers]
            note(event="post", incarnation=incarnation, numbers=numbers)
            log.append(*posted)
            note(event="posted", incarnation=incarnation, numbers=numbers)
            writer.check()
    except StaleIncarnationError:
        note(event="stale")
    except EnvironmentFailure as error:
        with suppress(StaleIncarnationError):  # a newer incarnation has removed it
            writer.check()
            raise ViolationError(f"the newest incarnation lost its log: {error}") from error


def agent(folder: Path, me: int, note: Note) -> None:
    """Serve the newest known incarnation, and leave it for a newer one (`Agent._check_fence`)."""
    paths = RunPaths(folder)
    history = History(paths.history)
    joined, reader = 0, LogReader(paths.master_log(0))
    for _ in range(12):
        newest = fold(history.read()).incarnation
        if newest != joined:
            joined, reader = newest, LogReader(paths.master_log(newest))
            note(event="joined", incarnation=joined)
        for message in reader.read():
            note(event="acted", incarnation=message["incarnation"], seq=message["seq"])


def _check(folder: Path, events: list[Event]) -> None:
    paths = RunPaths(folder)
    newest = fold(History(paths.history).read()).incarnation
    posted: dict[int, list[int]] = {}
    acknowledged: dict[int, list[int]] = {}
    joined: dict[int, int] = {}
    acted: dict[tuple[int, int], list[int]] = {}
    for event in events:
        actor, incarnation = event["actor"], event.get("incarnation", 0)
        if event["event"] == "post":
            posted.setdefault(incarnation, []).extend(event["numbers"])
        elif event["event"] == "posted":
            acknowledged.setdefault(incarnation, []).extend(event["numbers"])
        elif event["event"] == "joined":
            if incarnation <= joined.get(actor, 0):
                raise ViolationError(f"{event} after {joined}")
            joined[actor] = incarnation
        elif event["event"] == "acted":
            if incarnation != joined[actor]:
                raise ViolationError(f"{event} by an agent of {joined[actor]}")
            done = acted.setdefault((actor, incarnation), [])
            done.append(event["seq"])
            if done != posted.get(incarnation, [])[: len(done)]:
                raise ViolationError(f"acted on {done}, posted was {posted}")
    if newest:
        found = [message["seq"] for message in LogReader(paths.master_log(newest)).read()]
        told = acknowledged.get(newest, [])
        if found[: len(told)] != told or found != posted.get(newest, [])[: len(found)]:
            raise ViolationError(f"the log holds {found}; posted {posted}, told {told}")


SCENARIOS = (Scenario("control", setup, (master, agent, agent, master), _check, master),)
