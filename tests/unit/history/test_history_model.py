"""All interleavings of two masters, a cancel and a resume, paused anywhere between atomic actions.

The processes are the real code (`begin`, `IncarnationWriter`, `Committer`, `_clean`, `end`,
`resume`) on a history and a disk that exist in the model only. An atomic action is: read the
history, link a slot, write a checkpoint, list the checkpoints, remove one. A process is replayed
from what its actions have returned so far up to its next action, so a state of the model is the
history, the checkpoints on disk, and each process's returns.

Two things make it small without hiding anything: what a read returned is always a beginning of
the one history, so its length is kept; and a process that lost a slot is where it was before it
read, so its lost tries are forgotten (but for the count that bounds them).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from slurmrl.config.schema.config import Checkpoint
from slurmrl.errors import (
    CorruptFileError,
    SlotTakenError,
    StaleIncarnationError,
    TrialEndedError,
    UsageError,
)
from slurmrl.run.history.slots import Kind, Record
from slurmrl.run.history.state import (
    Commit,
    IncarnationWriter,
    TrialState,
    begin,
    end,
    fold,
    resume,
)
from slurmrl.workers.master import __main__
from slurmrl.workers.master import committer as committer_module
from slurmrl.workers.master.committer import Committer

STEPS = 3
REFUSED = (StaleIncarnationError, TrialEndedError, UsageError)

Entry = tuple[Kind, int, str]
"""A record: kind, incarnation, data as JSON."""
Log = tuple[Entry, ...]
Action = tuple[Any, ...]


class NextAction(BaseException):
    """Raised to stop a process at an action that has not happened yet."""


class Replay:
    """The actions of one process so far."""

    def __init__(self, log: Log, returns: tuple[Any, ...]) -> None:
        self.log = log
        self._returns = iter(returns)

    def act(self, *action: Any) -> Any:
        try:
            return next(self._returns)
        except StopIteration:
            raise NextAction(action) from None


class ModelHistory:
    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def read(self, *, at_least: int = 0) -> list[Record]:
        return records(self._replay.log[: self._replay.act("read")])

    def append(self, kind: Kind, incarnation: int, data: dict[str, Any], *, after: int) -> Record:
        entry = (kind, incarnation, json.dumps(data))
        if self._replay.act("append", after + 1, entry) == "taken":
            raise SlotTakenError(after + 1)
        return Record(after + 1, kind, incarnation, 0.0, data)


@dataclass(frozen=True)
class ModelPath:
    replay: Replay
    name: str

    def iterdir(self) -> list[ModelPath]:
        if self.name == "control":
            return []
        return [ModelPath(self.replay, name) for name in self.replay.act("list")]

    def __truediv__(self, name: str) -> ModelPath:
        return ModelPath(self.replay, name)


@dataclass(frozen=True)
class ModelPaths:
    replay: Replay

    @property
    def checkpoints(self) -> ModelPath:
        return ModelPath(self.replay, "checkpoints")

    @property
    def control(self) -> ModelPath:
        return ModelPath(self.replay, "control")

    def checkpoint(self, step: int, incarnation: int) -> ModelPath:
        return ModelPath(self.replay, f"step-{step:08d}.{incarnation}")


class ModelRanks:
    def post(self, message: dict[str, Any]) -> list[int]:
        return [0]

    def wait_saved(self, number: int, what: str, timeout_s: float) -> None:
        pass

    def saved(self, number: int) -> dict[int, Any]:
        return {}


def records(log: Log) -> list[Record]:
    return [
        Record(slot, kind, incarnation, 0.0, json.loads(data))
        for slot, (kind, incarnation, data) in enumerate(log)
    ]


# -- the processes -----------------------------------------------------------------------------


def master(replay: Replay) -> None:
    """One incarnation, as `serve` runs it: clean up, load the base, commit up to the last step."""
    history: Any = ModelHistory(replay)
    paths: Any = ModelPaths(replay)
    ranks: Any = ModelRanks()
    writer = begin(history, {})
    state = fold(history.read())
    __main__._clean(paths, state)
    base = state.last_commit.step if state.last_commit is not None else 0
    if state.last_commit is not None:
        replay.act("load", state.last_commit.directory, writer.incarnation)
    settings = Checkpoint(keep_last=1)
    committing = Committer(paths, writer, ranks, state.commits, settings, 60.0)
    for step in range(base + 1, STEPS + 1):
        committing.start(step, {}, asynchronous=False)
        committing.wait()
    writer.append(Kind.FINISHED, {})


def canceller(replay: Replay) -> None:
    history: Any = ModelHistory(replay)
    end(history, Kind.CANCELLED, {})


def resumer(replay: Replay) -> None:
    history: Any = ModelHistory(replay)
    resume(history, {})


# -- the model ---------------------------------------------------------------------------------


class State(NamedTuple):
    log: Log
    disk: frozenset[str]
    processes: tuple[tuple[Any, ...] | None, ...]
    """The results of each process's actions; None once it has ended."""


@dataclass
class Model:
    programs: tuple[Callable[[Replay], None], ...]
    ends: set[str] = field(default_factory=set)
    """How each process ended."""
    logs: set[Log] = field(default_factory=set)
    """Histories after which every process has ended."""
    states: int = 0
    _next: dict[tuple[int, Log, tuple[Any, ...]], Action | None] = field(default_factory=dict)

    def explore(self) -> None:
        """Visit every reachable state. Raises AssertionError with the state."""
        first = State((), frozenset(), ((),) * len(self.programs))
        seen, todo = {first}, [first]
        while todo:
            state = todo.pop()
            check(state)
            successors = [
                after
                for number in range(len(self.programs))
                if (after := self.step(state, number)) is not None
            ]
            if not successors:
                self.logs.add(state.log)
            new = [after for after in successors if after not in seen]
            seen.update(new)
            todo += new
        self.states = len(seen)

    def step(self, state: State, number: int) -> State | None:
        """Return the state after the next action of a process, or None if it has ended."""
        returns = state.processes[number]
        if returns is None:
            return None
        action = self.next_action(number, state.log, returns)
        if action is None:
            return self._moved(state, number, None)
        log, disk = state.log, state.disk
        if action[0] == "read":
            result: Any = len(log)
        elif action[0] == "append":
            _, slot, entry = action
            if slot < len(log):
                assert isinstance(returns[-1], int), "a slot is wanted right after a read"
                return self._moved(state, number, returns[:-1])
            log, result = (*log, entry), slot
        elif action[0] == "list":
            result = tuple(sorted(disk))
        elif action[0] == "load":
            _, directory, incarnation = action
            assert directory in disk or fold(records(log)).incarnation > incarnation, state
            result = None
        elif action[0] == "write":
            disk, result = disk | {action[1]}, None
        else:
            disk, result = disk - {action[1]}, None
        processes = list(state.processes)
        processes[number] = (*returns, result)
        return State(log, disk, tuple(processes))

    def next_action(self, number: int, log: Log, returns: tuple[Any, ...]) -> Action | None:
        known = log[: max((value for value in returns if type(value) is int), default=0)]
        key = (number, known, returns)
        if key not in self._next:
            self._next[key] = self._replay(number, known, returns)
        return self._next[key]

    def _replay(self, number: int, log: Log, returns: tuple[Any, ...]) -> Action | None:
        try:
            self.programs[number](Replay(log, returns))
        except NextAction as reached:
            action: Action = reached.args[0]
            return action
        except REFUSED as error:
            self.ends.add(f"{self.programs[number].__name__}: {type(error).__name__}")
        else:
            self.ends.add(f"{self.programs[number].__name__}: done")
        return None

    def _moved(self, state: State, number: int, returns: tuple[Any, ...] | None) -> State:
        processes = list(state.processes)
        processes[number] = returns
        return state._replace(processes=tuple(processes))


def check(state: State) -> None:
    """Check the invariants of docs/protocols.md."""
    missing = needed(state.log) - state.disk
    assert not missing, f"not on disk: {missing}, {state}"


@cache
def needed(log: Log) -> frozenset[str]:
    """Check the history, and return the checkpoints that must exist: the committed ones, and the
    base of the newest incarnation until it has its own commit.
    """
    try:
        now = fold(records(log))
    except CorruptFileError as error:
        raise AssertionError(f"a record of a fenced incarnation: {error}") from error
    steps = [json.loads(data)["step"] for kind, _, data in log if kind is Kind.COMMIT]
    assert steps == sorted(set(steps)), f"commits went back: {log}"
    for (kind, *_), (after, *_) in itertools.pairwise(log):
        assert not kind.is_end or after is Kind.RESUME, f"{after} after an end: {log}"
    directories = {commit.directory for commit in now.commits}
    if now.begin_slot >= 0 and now.end is None:
        base = fold(records(log[: now.begin_slot])).last_commit
        if base is not None and all(c.incarnation != now.incarnation for c in now.commits):
            directories.add(base.directory)
    return frozenset(directories)


@pytest.fixture(autouse=True)
def _files_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn file operations of the real code into actions of the model."""

    def remove(path: ModelPath, **options: Any) -> None:
        path.replay.act("remove", path.name)

    def write(directory: ModelPath, **options: Any) -> None:
        directory.replay.act("write", directory.name)

    def known_names(directory: ModelPath) -> list[str]:
        return [path.name for path in directory.iterdir()]

    monkeypatch.setattr(__main__, "known_names", known_names)
    for module in (committer_module, __main__):
        monkeypatch.setattr(module, "shutil", SimpleNamespace(rmtree=remove))
    monkeypatch.setattr(committer_module, "make_private_directory", lambda path: None)
    monkeypatch.setattr(committer_module, "write_manifest", write)
    monkeypatch.setattr(committer_module.logger, "info", lambda *arguments: None)


def explored(*programs: Callable[[Replay], None]) -> Model:
    model = Model(programs)
    model.explore()
    return model


def kinds(logs: set[Log]) -> set[str]:
    """Draw histories as words: the first letter of each kind, x for FINISHED."""
    letters = {Kind.FINISHED: "x"}
    return {"".join(letters.get(kind, kind.value[0]) for kind, *_ in log) for log in logs}


def test_history_stays_valid_with_two_masters_and_a_cancel() -> None:
    model = explored(master, master, canceller)
    assert model.ends == {
        "master: done",
        "master: StaleIncarnationError",
        "master: TrialEndedError",
        "canceller: done",
        "canceller: TrialEndedError",
    }
    words = kinds(model.logs)
    assert {"bccdcdx", "c", "bbccdcdx", "bccdbcdx", "bccdbc"} <= words
    assert model.states > 10_000


@pytest.mark.long
def test_history_stays_valid_with_a_resume_between_masters() -> None:
    model = explored(master, master, canceller, resumer)
    assert "resumer: done" in model.ends
    assert any("cr" in word and "bc" in word.partition("cr")[2] for word in kinds(model.logs))


def test_two_masters_finish_the_trial_once() -> None:
    model = explored(master, master)
    assert all(word.count("x") == 1 for word in kinds(model.logs))


# -- the model finds deliberate faults ------------------------------------------------------------


def test_model_check_finds_a_writer_without_fencing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IncarnationWriter, "_permitted", lambda self, state: self.incarnation)
    with pytest.raises(AssertionError, match="fenced incarnation"):
        explored(master, master)


def test_model_check_finds_a_writer_that_ignores_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def permitted(self: IncarnationWriter, state: TrialState) -> int:
        if state.incarnation != self.incarnation:
            raise StaleIncarnationError
        return self.incarnation

    monkeypatch.setattr(IncarnationWriter, "_permitted", permitted)
    with pytest.raises(AssertionError, match="after an end"):
        explored(master, canceller)


def test_model_check_finds_a_deletion_before_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def delete(self: Committer, old: Commit) -> None:
        self.commits.remove(old)
        committer_module.shutil.rmtree(self.paths.checkpoints / old.directory)
        self.writer.append(Kind.DELETE, {"step": old.step, "directory": old.directory})

    monkeypatch.setattr(Committer, "_delete", delete)
    with pytest.raises(AssertionError, match="not on disk"):
        explored(master, master)
