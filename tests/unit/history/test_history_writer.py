"""Two writers on one history: in any order, no record of an old incarnation follows a newer
incarnation.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmrl.errors import (
    SlotTakenError,
    StaleIncarnationError,
    TrialEndedError,
    UsageError,
)
from slurmrl.fsio.calls import SystemCalls
from slurmrl.run.history.slots import History, Kind, Record
from slurmrl.run.history.state import IncarnationWriter, begin, end, fold, resume

STEP = {"step": 1, "directory": "d1"}


def kinds(directory: Path) -> list[tuple[Kind, int]]:
    return [(record.kind, record.incarnation) for record in History(directory).read()]


def test_incarnations_count_up(tmp_path: Path) -> None:
    history = History(tmp_path)
    assert begin(history, {"job": "a"}).incarnation == 1
    writer = begin(History(tmp_path), {"job": "b"})
    assert writer.incarnation == 2
    assert writer.check().begin_data == {"job": "b"}
    record = writer.append(Kind.COMMIT, STEP)
    assert (record.slot, record.incarnation) == (2, 2)
    assert fold(history.read()).last_commit is not None


def test_stale_master_cannot_append_after_a_newer_begin(tmp_path: Path) -> None:
    zombie = begin(History(tmp_path), {})
    zombie.append(Kind.COMMIT, STEP)
    begin(History(tmp_path), {})
    before = kinds(tmp_path)
    for act in (zombie.check, lambda: zombie.append(Kind.COMMIT, {"step": 2, "directory": "d2"})):
        with pytest.raises(StaleIncarnationError, match="1 must stop: 2"):
            act()
    assert kinds(tmp_path) == before


class Interrupted(SystemCalls):
    """A callback between a writer's check and its link, where the writer was paused."""

    def __init__(self) -> None:
        self.meanwhile: list[Callable[[], object]] = []

    def link(self, source: Path, target: Path) -> None:
        while self.meanwhile:
            self.meanwhile.pop(0)()
        super().link(source, target)


def test_stale_master_paused_between_check_and_link_cannot_append(tmp_path: Path) -> None:
    calls = Interrupted()
    zombie = begin(History(tmp_path, calls=calls), {})
    calls.meanwhile.append(lambda: begin(History(tmp_path), {}))
    with pytest.raises(StaleIncarnationError):
        zombie.append(Kind.COMMIT, STEP)
    assert kinds(tmp_path) == [(Kind.BEGIN, 1), (Kind.BEGIN, 2)]


def test_writer_paused_while_a_command_ended_the_trial_stops(tmp_path: Path) -> None:
    calls = Interrupted()
    writer = begin(History(tmp_path, calls=calls), {})
    calls.meanwhile.append(lambda: end(History(tmp_path), Kind.CANCELLED, {}))
    with pytest.raises(TrialEndedError, match="cancelled"):
        writer.append(Kind.COMMIT, STEP)
    assert kinds(tmp_path) == [(Kind.BEGIN, 1), (Kind.CANCELLED, 1)]


def test_begin_that_loses_its_slot_takes_the_next(tmp_path: Path) -> None:
    calls = Interrupted()
    calls.meanwhile += [lambda: begin(History(tmp_path), {}), lambda: begin(History(tmp_path), {})]
    assert begin(History(tmp_path, calls=calls), {}).incarnation == 3
    assert kinds(tmp_path) == [(Kind.BEGIN, 1), (Kind.BEGIN, 2), (Kind.BEGIN, 3)]


def test_current_writer_continues_after_losing_a_slot(tmp_path: Path) -> None:
    calls = Interrupted()
    writer = begin(History(tmp_path, calls=calls), {})
    other = IncarnationWriter(History(tmp_path), 1)
    calls.meanwhile.append(lambda: other.append(Kind.EXPORT, STEP))
    assert writer.append(Kind.COMMIT, STEP).slot == 2


def test_end_record_stops_all_writers_until_a_resume(tmp_path: Path) -> None:
    history = History(tmp_path)
    writer = begin(history, {})
    end(history, Kind.FAILED, {"reason": "no progress"})
    for act in (
        writer.check,
        lambda: writer.append(Kind.COMMIT, STEP),
        lambda: begin(history, {}),
        lambda: end(history, Kind.CANCELLED, {}),
    ):
        with pytest.raises(TrialEndedError, match="failed, no progress"):
            act()
    resume(history, {})
    with pytest.raises(TrialEndedError, match="resumed"):
        writer.append(Kind.COMMIT, STEP)
    assert begin(history, {}).incarnation == 2
    with pytest.raises(StaleIncarnationError):
        writer.check()


def test_master_cannot_commit_after_its_own_end_record(tmp_path: Path) -> None:
    writer = begin(History(tmp_path), {})
    writer.append(Kind.FINISHED, {"step": 3})
    with pytest.raises(TrialEndedError, match="finished"):
        writer.append(Kind.COMMIT, STEP)


def test_history_rejects_resume_of_a_live_trial_and_end_by_a_commit(tmp_path: Path) -> None:
    history = History(tmp_path)
    with pytest.raises(UsageError, match="nothing to resume"):
        resume(history, {})
    with pytest.raises(UsageError, match="'commit'"):
        end(history, Kind.COMMIT, STEP)
    end(history, Kind.CANCELLED, {})
    resume(history, {})
    assert begin(history, {}).incarnation == 1


def test_incarnation_without_begin_may_not_append(tmp_path: Path) -> None:
    with pytest.raises(StaleIncarnationError):
        IncarnationWriter(History(tmp_path), 1).append(Kind.COMMIT, STEP)


class AlwaysLate(History):
    def append(self, *args: object, **more: object) -> Record:
        raise SlotTakenError(-1)


def test_writer_that_loses_every_slot_stops_after_a_limit(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="in a row"):
        begin(AlwaysLate(tmp_path), {})


MASTERS = """
import os, sys
from pathlib import Path
from slurmrl.errors import StaleIncarnationError
from slurmrl.run.history.slots import History
from slurmrl.run.history.slots import Kind
from slurmrl.run.history.state import begin
directory, masters, lives = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for master in range(masters):
    if os.fork() == 0:
        for life in range(lives):
            writer = begin(History(directory), {"master": master})
            try:
                for step in range(3):
                    name = f"{writer.incarnation}.{step}"
                    writer.append(Kind.COMMIT, {"step": step, "directory": name})
            except StaleIncarnationError:
                pass
        os._exit(0)
sys.exit(any([os.wait()[1] for _ in range(masters)]))
"""


def test_masters_in_several_processes_keep_record_order(tmp_path: Path) -> None:
    masters, lives = 4, 10
    command = [sys.executable, "-c", MASTERS, str(tmp_path), str(masters), str(lives)]
    subprocess.run(command, check=True, timeout=120)
    state = fold(History(tmp_path).read())
    assert state.incarnation == masters * lives
    assert state.commits
