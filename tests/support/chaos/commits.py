"""Scenarios: the real committer commits and deletes checkpoints, next to processes of dead
incarnations. A fake workforce writes the ranks' files.
"""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from typing import Any

from slurmrl.config.schema.config import Checkpoint
from slurmrl.errors import (
    CheckpointError,
    CorruptFileError,
    EnvironmentFailure,
    StaleIncarnationError,
)
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, explain, write_new
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import IncarnationWriter, begin, fold
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint.manifest import read_state, verify
from slurmrl.tensors.checkpoint.tensors import SavedFile, checksum
from slurmrl.workers.master.__main__ import _clean
from slurmrl.workers.master.committer import Committer, Outcome
from slurmrl.workers.messages import Done, Save, Saved
from tests.support.chaos.control import setup
from tests.support.chaos.histories import check_history
from tests.support.chaos.schedule import Event, Scenario, ViolationError
from tests.support.chaos.stepping import Note

RANKS = 2
STEPS = 3


class Ranks:
    """A workforce whose ranks copy immediately and write while the master does other things: each
    check lets one rank write its file. The first attempt to write the second checkpoint fails
    halfway.
    """

    def __init__(self, paths: RunPaths, incarnation: int) -> None:
        self._paths = paths
        self._incarnation = incarnation
        self._save: Save | None = None
        self._saves = 0
        self._answers: list[tuple[Done, Saved]] = []

    def post(self, order: Save) -> list[int]:
        self._save, self._answers = order, []
        self._saves += 1
        return [0]

    def saved(self, number: int) -> list[tuple[Done, Saved]] | None:
        rank = len(self._answers)
        if rank < RANKS:
            full = self._saves == 2 and rank + 1 == RANKS
            files = () if full else (self._write(rank),)
            error = "no space left" if full else ""
            saved = Saved(rank=rank, seq=number, files=files, error=error)
            self._answers.append((Done(rank=rank, seq=number, seconds=0.0), saved))
        return self._answers if rank + 1 >= RANKS else None

    def wait_saved(self, number: int, what: str, timeout_s: float) -> None:
        while self.saved(number) is None:
            pass

    def _write(self, rank: int) -> SavedFile:
        assert self._save is not None
        name = f"actor.{rank}.bin"
        data = f"{rank} {self._save.step} {self._incarnation} ".encode() * 100
        path = self._paths.checkpoints / self._save.directory / name
        try:
            write_new(path, data, True, REAL)
        except OSError as error:
            raise explain(error, "save", path) from error
        return SavedFile(name, len(data), checksum(BytesIO(data)))


def master(folder: Path, me: int, note: Note) -> None:
    """Resume from the newest commit, as `serve` does, and keep one checkpoint."""
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
        settings = Checkpoint(keep_last=1)
        committer = Committer(paths, writer, ranks, state.commits, settings, 60.0)
        for step in range(base + 1, base + 1 + STEPS):
            _tell(committer.wait(), writer, note)
            _tell(committer.start(step, {"step": step}, asynchronous=True), writer, note)
            _tell(committer.poll(), writer, note)
        _tell(committer.wait(), writer, note)
        if committer.last_step != base + STEPS:
            raise ViolationError(f"the newest commit is of step {committer.last_step}")
    except StaleIncarnationError:
        note(event="stale")
    except (CheckpointError, EnvironmentFailure) as error:
        # Harmless if a newer incarnation has deleted our base: it also removes our files.
        writer.check()
        raise ViolationError(f"the newest incarnation lost files: {error}") from error


def _tell(outcome: Outcome | None, writer: IncarnationWriter, note: Note) -> None:
    if outcome is None:
        return
    if outcome.error == "rank 1: no space left":
        note(event="failed", step=outcome.step, incarnation=writer.incarnation)
    elif outcome.error is not None:
        raise EnvironmentFailure(outcome.error)
    else:
        note(event="committed", step=outcome.step, incarnation=writer.incarnation)


def successor(folder: Path, me: int, note: Note) -> None:
    try:
        master(folder, me, note)
    except StaleIncarnationError:
        note(event="stale")


def late_writer(folder: Path, me: int, note: Note) -> None:
    """Threads of ranks that continue to write after their master has ended."""
    paths = RunPaths(folder)
    for number in range(4):
        for name in leftovers(folder):
            try:
                write_new(paths.checkpoints / name / f"late.{number}", b"late" * 100, True, REAL)
            except FileNotFoundError:
                note(event="too late", directory=name)
            except FileExistsError:
                raise ViolationError(f"{name}/late.{number} was written already") from None


def reader(folder: Path, me: int, note: Note) -> None:
    """Read the newest commit, like `status`, an export or a warm start."""
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
    """Return the folders of checkpoints that the history does not name."""
    paths = RunPaths(folder)
    named = {commit.directory for commit in fold(History(paths.history).read()).commits}
    return sorted(set(os.listdir(paths.checkpoints)) - named)


def _check_clean(folder: Path, events: list[Event]) -> None:
    """Begin one more incarnation at the end, and check that it leaves no unnamed folder."""
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
    Scenario("deletion", setup, (successor, successor, late_writer), _check_clean, successor),
)
