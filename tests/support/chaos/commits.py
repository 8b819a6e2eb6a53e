"""Scenarios: commits of checkpoints by the real committer, their deletion, and what a zombie does.

The ranks are played by a workforce that writes their files itself.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from slurmrl.checkpoint.manifest import read_state, verify
from slurmrl.errors import (
    CheckpointError,
    CorruptFileError,
    EnvironmentFailure,
    StaleIncarnationError,
)
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL
from slurmrl.fsio.failures import explain
from slurmrl.fsio.primitives import write_new
from slurmrl.history.log import History
from slurmrl.history.state import fold
from slurmrl.history.writer import begin
from slurmrl.paths import RunPaths
from slurmrl.workers.master.committer import Committer
from slurmrl.workers.master.serve import _clean
from tests.support.chaos.control import setup
from tests.support.chaos.histories import check_history
from tests.support.chaos.schedule import Event, Scenario, ViolationError
from tests.support.chaos.stepping import Note

RANKS = 2
STEPS = 3


class Ranks:
    """A workforce that saves at once: `post` writes a file per rank, `collect` tells of them."""

    def __init__(self, paths: RunPaths, incarnation: int) -> None:
        self._paths = paths
        self._incarnation = incarnation
        self._files: dict[int, dict[str, Any]] = {}

    def post(self, message: dict[str, Any]) -> list[int]:
        for rank in range(RANKS):
            name = f"actor.{rank}.bin"
            data = f"{rank} {message['step']} {self._incarnation} ".encode() * 100
            path = self._paths.checkpoints / message["directory"] / name
            try:
                write_new(path, data, True, REAL)
            except OSError as error:
                raise explain(error, "save", path) from error
            checksum = f"sha256:{hashlib.sha256(data).hexdigest()}"
            file = {"name": name, "size": len(data), "checksum": checksum}
            self._files[rank] = {"files": [file]}
        return [0]

    def collect(self, number: int, what: str, timeout_s: float) -> dict[int, dict[str, Any]]:
        return self._files


def master(folder: Path, me: int, note: Note) -> None:
    """Goes on from the newest commit, as `serve` does, and keeps one checkpoint."""
    paths = RunPaths(folder)
    history = History(paths.history)
    try:
        writer = begin(history, {"by": me})
        note(event="began", incarnation=writer.incarnation, by=me)
        state = fold(history.read())
        _clean(paths, state)
        base = 0
        if state.last_commit is not None:
            base = read_state(paths.checkpoints / state.last_commit.directory)["step"]
            if base != state.last_commit.step:
                raise ViolationError(f"state of step {base} in {state.last_commit}")
        ranks: Any = Ranks(paths, writer.incarnation)
        committer = Committer(paths, writer, ranks, state.commits, 1, 60.0)
        for step in range(base + 1, base + 1 + STEPS):
            committer.commit(step, {"step": step})
            note(event="committed", step=step, incarnation=writer.incarnation)
    except StaleIncarnationError:
        note(event="stale")
    except (CheckpointError, EnvironmentFailure) as error:
        # Harmless if a newer one has begun: it may have deleted our base, and cleans up our files.
        writer.check()
        raise ViolationError(f"the newest incarnation lost files: {error}") from error


def successor(folder: Path, me: int, note: Note) -> None:
    try:
        master(folder, me, note)
    except StaleIncarnationError:
        note(event="stale")


def reader(folder: Path, me: int, note: Note) -> None:
    """What `status`, an export or a warm start does: take the newest commit and read it."""
    paths = RunPaths(folder)
    for _ in range(3):
        last = fold(History(paths.history).read()).last_commit
        if last is None:
            continue
        try:
            verify(paths.checkpoints / last.directory)
        except (CheckpointError, CorruptFileError, OSError) as error:
            if last in fold(History(paths.history).read()).commits:
                note(event="broken", commit=last.directory, error=str(error))
        else:
            note(event="verified", step=last.step)


def _check(folder: Path, events: list[Event]) -> None:
    paths = RunPaths(folder)
    state = fold(check_history(paths.history, events))
    for commit in state.commits:
        try:
            verify(paths.checkpoints / commit.directory)
        except CheckpointError as error:
            raise ViolationError(f"the history names a broken checkpoint: {error}") from error
    done: list[int] = []
    for event in events:
        if event["event"] == "broken":
            raise ViolationError(f"a committed checkpoint was broken: {event}")
        if event["event"] == "committed":
            done.append(event["step"])
    if done and (state.last_commit is None or state.last_commit.step < max(done)):
        raise ViolationError(f"committed {done}, but {state.last_commit} is the newest")
    steps = [
        record.data["step"] for record in History(paths.history).read() if record.kind == "commit"
    ]
    if steps != sorted(set(steps)):
        raise ViolationError(f"commits went back: {steps}")


def leftovers(folder: Path) -> list[str]:
    """Folders of checkpoints that the history does not name."""
    paths = RunPaths(folder)
    named = {commit.directory for commit in fold(History(paths.history).read()).commits}
    return sorted(set(os.listdir(paths.checkpoints)) - named)


def _check_clean(folder: Path, events: list[Event]) -> None:
    """In the end one more incarnation begins: it leaves nothing that is not named."""
    _check(folder, events)
    paths = RunPaths(folder)
    begin(History(paths.history), {"by": -1})
    _clean(paths, fold(History(paths.history).read()))
    left = leftovers(folder)
    if left:
        raise ViolationError(f"never cleaned up: {left}")
    atomic.sweep_temporaries(paths.history)


SCENARIOS = (
    Scenario("commit", setup, (successor, reader, reader), _check, successor),
    Scenario("deletion", setup, (successor, successor, reader), _check_clean, successor),
)
