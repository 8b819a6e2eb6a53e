"""State machines by Hypothesis: name stores against a dict, the history with two masters and
commands, and the control log with restarting writers, partial frames and readers.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from slurmrl.errors import (
    EnvironmentFailure,
    NameExistsError,
    NameNotFoundError,
    StaleIncarnationError,
    TrialEndedError,
    UsageError,
)
from slurmrl.fsio.calls import SystemCalls
from slurmrl.name_resolve.store import NameStore
from slurmrl.run.channel.message_log import LogReader, LogWriter, encode
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import IncarnationWriter, begin, end, fold, resume

SETTINGS = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=True,
)

KEYS = st.sampled_from(["a", "a/b", "a/b/c", "ab", "ü/%2f", "a+b", ".hidden", "~"])
SPELLINGS = st.sampled_from(["{}", "{}/", "/{}", "./{}"])
VALUES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


class NoWait(SystemCalls):
    """fsync and sleeping take no time."""

    def fsync(self, descriptor: int) -> None:
        pass

    def fsync_directory(self, directory: Path) -> None:
        pass

    def sleep(self, seconds: float) -> None:
        pass


CALLS = NoWait()


class InFolder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="machine-"))

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


# -- names -------------------------------------------------------------------------------------


class Names(InFolder):
    """Two clients of one store."""

    def __init__(self) -> None:
        super().__init__()
        self.stores = [NameStore(self.folder, calls=CALLS) for _ in range(2)]
        self.model: dict[str, str] = {}

    @rule(client=st.integers(0, 1), key=KEYS, how=SPELLINGS, value=VALUES)
    def add(self, client: int, key: str, how: str, value: str) -> None:
        store = self.stores[client]
        if key in self.model:
            with pytest.raises(NameExistsError):
                store.add(how.format(key), value)
            return
        store.add(how.format(key), value)
        self.model[key] = value

    @rule(client=st.integers(0, 1), key=KEYS, value=VALUES)
    def replace(self, client: int, key: str, value: str) -> None:
        self.stores[client].add(key, value, replace=True)
        self.model[key] = value

    @rule(client=st.integers(0, 1), key=KEYS, how=SPELLINGS)
    def get(self, client: int, key: str, how: str) -> None:
        if key in self.model:
            assert self.stores[client].get(how.format(key)) == self.model[key]
        else:
            with pytest.raises(NameNotFoundError):
                self.stores[client].get(how.format(key))

    @rule(client=st.integers(0, 1), root=KEYS)
    def subtree(self, client: int, root: str) -> None:
        keys = sorted(key for key in self.model if key == root or key.startswith(f"{root}/"))
        assert self.stores[client].find_subtree(root) == keys
        assert self.stores[client].get_subtree(root) == [self.model[key] for key in keys]

    @invariant()
    def all_keys(self) -> None:
        assert self.stores[0].find_subtree("") == sorted(self.model)


# -- history -----------------------------------------------------------------------------------


class Histories(InFolder):
    """Masters begin and stop, stale masters keep trying, and commands end and resume the trial."""

    masters = Bundle("masters")

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[Kind, int]] = []
        self.newest = 0
        self.ended = False
        self.ended_since_begin = False
        self.step = 0
        self.commits: list[int] = []
        self.reader = self._history()

    def _history(self) -> History:
        return History(self.folder, calls=CALLS)

    @rule(target=masters)
    def begin(self) -> IncarnationWriter | None:
        if self.ended:
            with pytest.raises(TrialEndedError):
                begin(self._history(), {})
            return None
        writer = begin(self._history(), {})
        self.newest += 1
        self.ended_since_begin = False
        assert writer.incarnation == self.newest
        self.log.append((Kind.BEGIN, self.newest))
        return writer

    @rule(master=masters, kind=st.sampled_from([Kind.COMMIT, Kind.EXPORT, Kind.FINISHED]))
    def append(self, master: IncarnationWriter | None, kind: Kind) -> None:
        if master is None:
            return
        data = {"step": self.step + 1, "directory": f"step-{self.step + 1}"}
        if master.incarnation != self.newest:
            with pytest.raises(StaleIncarnationError):
                master.append(kind, data)
        elif self.ended_since_begin:
            with pytest.raises(TrialEndedError):
                master.append(kind, data)
        else:
            assert master.append(kind, data).slot == len(self.log)
            self.log.append((kind, self.newest))
            if kind is Kind.COMMIT:
                self.step += 1
                self.commits.append(self.step)
            elif kind.is_end:
                self.ended = self.ended_since_begin = True

    @precondition(lambda self: self.commits)
    @rule(master=masters)
    def delete(self, master: IncarnationWriter | None) -> None:
        if master is None or master.incarnation != self.newest or self.ended_since_begin:
            return
        step = self.commits.pop(0)
        master.append(Kind.DELETE, {"step": step, "directory": f"step-{step}"})
        self.log.append((Kind.DELETE, self.newest))

    @rule(kind=st.sampled_from([Kind.CANCELLED, Kind.FAILED]))
    def end(self, kind: Kind) -> None:
        if self.ended:
            with pytest.raises(TrialEndedError):
                end(self._history(), kind, {})
            return
        end(self._history(), kind, {})
        self.ended = self.ended_since_begin = True
        self.log.append((kind, self.newest))

    @rule()
    def resume(self) -> None:
        if not self.ended:
            with pytest.raises(UsageError):
                resume(self._history(), {})
            return
        resume(self._history(), {})
        self.ended = False
        self.log.append((Kind.RESUME, self.newest))

    @invariant()
    def everybody_sees_the_same(self) -> None:
        for history in (self.reader, self._history()):
            records = history.read()
            assert [(record.kind, record.incarnation) for record in records] == self.log
            state = fold(records)
            assert (state.incarnation, state.end is not None) == (self.newest, self.ended)
            assert [commit.step for commit in state.commits] == self.commits


# -- the log -----------------------------------------------------------------------------------


class FailsAfter(NoWait):
    """File operations of which one write stores only the given number of bytes, and then fails."""

    left: int | None = None

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        if self.left is None:
            return super().pwrite(descriptor, data, offset)
        if self.left == 0:
            self.left = None
            raise OSError(28, "No space left on device")
        written = super().pwrite(descriptor, memoryview(data)[: self.left], offset)
        self.left -= written
        return written


class Logs(InFolder):
    """A writer whose writes may be partial, and which restarts with a new log like each
    incarnation, and readers that join at any time.
    """

    readers = Bundle("readers")

    def __init__(self) -> None:
        super().__init__()
        self.incarnation = 0
        self.number = 0
        self.posted: list[list[int]] = []
        self.sure: list[int] = []
        """The number of acknowledged messages of each log."""

    @initialize()
    def first(self) -> None:
        self._start()

    def _start(self) -> None:
        self.calls = FailsAfter()
        path = self.folder / f"{len(self.posted)}"
        self.writer = LogWriter(path, calls=self.calls, segment_bytes=300)
        self.posted.append([])
        self.sure.append(0)

    @rule()
    def restart(self) -> None:
        """Start another writer process. Queued messages are lost, and the old log keeps its partial
        frame.
        """
        with pytest.raises(FileExistsError):
            LogWriter(self.folder / f"{len(self.posted) - 1}", calls=CALLS)
        self._start()

    @rule(sizes=st.lists(st.integers(0, 200), max_size=3))
    def append(self, sizes: list[int]) -> None:
        self._append(sizes)
        self.sure[-1] = len(self.posted[-1])

    @rule(sizes=st.lists(st.integers(0, 200), min_size=1, max_size=3), left=st.integers(0, 400))
    def append_torn(self, sizes: list[int], left: int) -> None:
        self.calls.left = left
        try:
            self._append(sizes)
        except EnvironmentFailure:
            return  # the messages stay queued
        self.calls.left = None
        self.sure[-1] = len(self.posted[-1])

    def _append(self, sizes: list[int]) -> None:
        messages: list[dict[str, Any]] = []
        for size in sizes:
            messages.append({"n": self.number, "padding": "p" * size})
            self.posted[-1].append(self.number)
            self.number += 1
        self.writer.append(*messages)

    @rule(target=readers, back=st.integers(0, 2))
    def open_reader(self, back: int) -> tuple[int, LogReader, list[int]]:
        log = max(len(self.posted) - 1 - back, 0)
        return log, LogReader(self.folder / f"{log}", calls=CALLS), []

    @rule(reader=readers)
    def read(self, reader: tuple[int, LogReader, list[int]]) -> None:
        log, follow, seen = reader
        seen += [message["n"] for message in follow.read()]
        assert seen == self.posted[log][: len(seen)]
        assert len(seen) >= self.sure[log]

    @rule(garbage=st.binary(max_size=60), cut=st.integers(1, 30))
    def torn_tail(self, garbage: bytes, cut: int) -> None:
        """Add a partial frame or random bytes after the last message. Readers ignore them, and the
        writer overwrites them.
        """
        path = self.folder / "noise"
        path.unlink(missing_ok=True)
        writer = LogWriter(path, calls=CALLS)
        writer.append({"n": 1})
        whole = path.read_bytes()
        with path.open("ab") as file:
            file.write(encode({"n": 2})[:-cut] if cut % 2 else garbage)
        reader = LogReader(path, calls=CALLS)
        assert [message["n"] for message in reader.read()] == [1]
        writer.append({"n": 3})
        assert path.read_bytes().startswith(whole + encode({"n": 3}))
        assert [message["n"] for message in reader.read()] == [3]


@pytest.mark.parametrize("machine", [Names, Histories, Logs])
def test_state_machine_finds_no_violation(machine: type[RuleBasedStateMachine]) -> None:
    run_state_machine_as_test(machine, settings=SETTINGS)


@pytest.mark.soak
@pytest.mark.parametrize("machine", [Names, Histories, Logs])
def test_longer_state_machine_finds_no_violation(machine: type[RuleBasedStateMachine]) -> None:
    longer = settings(SETTINGS, max_examples=400, derandomize=False)
    run_state_machine_as_test(machine, settings=longer)
