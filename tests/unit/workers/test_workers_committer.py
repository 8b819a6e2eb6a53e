"""Commits: manifest, then history, then deletions; killed anywhere, the history stays right."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from slurmrl.checkpoint.manifest import read_state, verify
from slurmrl.checkpoint.tensors import checksum
from slurmrl.errors import StaleIncarnationError
from slurmrl.fsio.calls import SystemCalls
from slurmrl.history.log import History
from slurmrl.history.record import Kind
from slurmrl.history.state import TrialState, fold
from slurmrl.history.writer import begin
from slurmrl.paths import RunPaths
from slurmrl.workers import messages
from slurmrl.workers.master import serve
from slurmrl.workers.master.committer import Committer
from slurmrl.workers.master.workforce import Workforce

WRITES = (
    "open",
    "close",
    "write",
    "pwrite",
    "fsync",
    "link",
    "rename",
    "unlink",
    "mkdir",
    "fsync_directory",
)


class Killed(BaseException):
    """The process is gone: nothing of it happens any more."""


class FakeWorkforce:
    """Two ranks, each of which writes a file; or ranks that fail."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.posted: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def post(self, *batch: dict[str, Any]) -> list[int]:
        self.posted += batch
        return [len(self.posted) - 1]

    def collect(self, number: int, what: str, timeout_s: float) -> dict[int, dict[str, Any]]:
        if self.error is not None:
            raise self.error
        message = self.posted[number]
        directory = self.paths.checkpoints / message["directory"]
        return {rank: {"files": [self._file(directory, rank)]} for rank in (1, 0)}

    def _file(self, directory: Path, rank: int) -> dict[str, Any]:
        path = directory / f"actor.{rank}.safetensors"
        path.write_bytes(f"weights of rank {rank} in {directory.name}".encode())
        return {"name": path.name, "size": path.stat().st_size, "checksum": checksum(path)}


class Trial:
    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.workforce = FakeWorkforce(paths)

    def committer(self, keep_last: int = 2) -> Committer:
        """Of a new incarnation, which has cleaned up as the master does."""
        writer = begin(History(self.paths.history), {})
        serve._clean(self.paths, self.state)
        workforce = cast(Workforce, self.workforce)
        return Committer(self.paths, writer, workforce, self.state.commits, keep_last, 10.0)

    @property
    def state(self) -> TrialState:
        return fold(History(self.paths.history).read())

    @property
    def on_disk(self) -> list[str]:
        return sorted(entry.name for entry in self.paths.checkpoints.iterdir())

    def check(self) -> int | None:
        """Everything that the history names is whole; the step of the newest."""
        for commit in self.state.commits:
            directory = self.paths.checkpoints / commit.directory
            assert verify(directory).step == commit.step
            assert read_state(directory) == {"step": commit.step}
        last = self.state.last_commit
        return last.step if last else None


@pytest.fixture
def trial(paths: RunPaths) -> Trial:
    return Trial(paths)


def commit(committer: Committer, *steps: int) -> None:
    for step in steps:
        committer.commit(step, {"step": step})


def test_commit_is_whole_and_named(trial: Trial) -> None:
    committer = trial.committer()
    assert committer.last_step is None
    commit(committer, 3)
    assert committer.last_step == 3
    assert trial.check() == 3
    assert trial.on_disk == ["step-00000003.1"]
    assert trial.workforce.posted == [
        {"type": messages.SAVE, "step": 3, "directory": "step-00000003.1"}
    ]
    manifest = verify(trial.paths.checkpoint(3, 1))
    names = [file.name for file in manifest.files]
    assert names == ["actor.0.safetensors", "actor.1.safetensors", "state.json"]


def test_oldest_commits_are_deleted_after_their_slot(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = []
    rmtree = shutil.rmtree

    def watching(path: Path, **more: Any) -> None:
        records = History(trial.paths.history).read()
        deleted = [r.data["directory"] for r in records if r.kind is Kind.DELETE]
        assert path.name in deleted, "removed before the history said so"
        removed.append(path.name)
        rmtree(path, **more)

    committer = trial.committer(keep_last=2)
    monkeypatch.setattr(shutil, "rmtree", watching)
    commit(committer, 1, 2, 3, 4)
    assert removed == ["step-00000001.1", "step-00000002.1"]
    assert [one.step for one in trial.state.commits] == [3, 4]
    assert trial.on_disk == ["step-00000003.1", "step-00000004.1"]
    trial.check()


def test_commits_of_earlier_incarnations_are_counted(trial: Trial) -> None:
    commit(trial.committer(keep_last=2), 1, 2)
    later = trial.committer(keep_last=1)
    assert later.last_step == 2
    commit(later, 3)
    assert trial.on_disk == ["step-00000003.2"]


def test_rank_that_fails_leaves_no_commit(trial: Trial) -> None:
    committer = trial.committer()
    commit(committer, 1)
    trial.workforce.error = RuntimeError("rank 1 is gone")
    with pytest.raises(RuntimeError, match="rank 1"):
        commit(committer, 2)
    assert trial.check() == 1
    assert committer.last_step == 1


def test_newer_incarnation_fences_the_commit(trial: Trial) -> None:
    stale = trial.committer()
    commit(stale, 1)
    begin(History(trial.paths.history), {})
    with pytest.raises(StaleIncarnationError):
        commit(stale, 2)
    assert trial.check() == 1
    fresh = trial.committer()
    assert trial.on_disk == ["step-00000001.1"]
    commit(fresh, 2)
    assert trial.check() == 2


@contextmanager
def kill_at(number: int) -> Iterator[list[str]]:
    """Every operation that changes the directory, from the ``number``-th on, kills."""
    done: list[str] = []

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if len(done) >= number:
                raise Killed
            done.append(name)
            return real(*arguments, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in WRITES:
            patch.setattr(SystemCalls, name, counted(name, getattr(SystemCalls, name)))
        patch.setattr(shutil, "rmtree", counted("rmtree", shutil.rmtree))
        yield done


def operations_of_a_commit(folder: Path) -> int:
    trial = Trial(_run_directory(folder))
    committer = trial.committer(keep_last=1)
    commit(committer, 1)
    with kill_at(10_000) as done:
        commit(committer, 2)
    assert done[-1] == "rmtree"
    return len(done)


def _run_directory(folder: Path) -> RunPaths:
    paths = RunPaths(folder)
    for directory in paths.directories():
        directory.mkdir(parents=True)
    return paths


def test_killed_at_any_operation(tmp_path: Path) -> None:
    """There is always a whole commit to go on from: the old one until the new one's slot, then
    the new one. The next incarnation removes what is not named, and commits."""
    total = operations_of_a_commit(tmp_path / "count")
    assert total > 20
    steps = []
    for number in range(total):
        trial = Trial(_run_directory(tmp_path / str(number)))
        committer = trial.committer(keep_last=1)
        commit(committer, 1)
        with kill_at(number), pytest.raises(Killed):
            commit(committer, 2)
        found = trial.check()
        assert found is not None
        steps.append(found)
        successor = trial.committer(keep_last=1)
        named = {one.directory for one in trial.state.commits}
        assert set(trial.on_disk) == named
        commit(successor, 3)
        assert trial.check() == 3
        assert trial.on_disk == ["step-00000003.2"]
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}
