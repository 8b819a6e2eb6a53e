"""Commits: manifest, then history, then deletions. The history is right after a kill at
any point.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import pytest

from slurmrl.config.schema.config import Checkpoint
from slurmrl.errors import StaleIncarnationError
from slurmrl.fsio.calls import SystemCalls
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import TrialState, begin, fold
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint.manifest import read_state, verify
from slurmrl.tensors.checkpoint.tensors import SavedFile, checksum
from slurmrl.workers.master import __main__
from slurmrl.workers.master.committer import Committer, Outcome
from slurmrl.workers.master.worker_channel import WorkerChannel
from slurmrl.workers.messages import Done, Save, Saved


class FakeWorkforce:
    """Two ranks that write their files while the master waits, or that fail."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.posted: list[Save] = []
        self.error: Exception | None = None
        """Raised by waiting."""
        self.errors: dict[int, str] = {}
        """A rank's report in place of its files."""
        self.answers: dict[int, list[tuple[Done, Saved]]] = {}

    def post(self, *batch: Save) -> list[int]:
        self.posted += batch
        return [len(self.posted) - 1]

    def wait_saved(self, number: int, what: str, timeout_s: float) -> None:
        if self.error is not None:
            raise self.error
        directory = self.paths.checkpoints / self.posted[number].directory
        self.answers[number] = [self._answer(directory, rank, number) for rank in (0, 1)]

    def _answer(self, directory: Path, rank: int, number: int) -> tuple[Done, Saved]:
        done = Done(rank=rank, seq=number, seconds=rank / 8)
        files = (self._file(directory, rank),)
        if rank in self.errors:
            return done, Saved(rank=rank, seq=number, error=self.errors[rank])
        return done, Saved(rank=rank, seq=number, files=files)

    def saved(self, number: int) -> list[tuple[Done, Saved]] | None:
        return self.answers.pop(number, None)

    def _file(self, directory: Path, rank: int) -> SavedFile:
        path = directory / f"actor.{rank}.safetensors"
        data = f"weights of rank {rank} in {directory.name}".encode()
        path.write_bytes(data)
        return SavedFile(path.name, len(data), checksum(BytesIO(data)))


class Trial:
    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.channel = FakeWorkforce(paths)

    def committer(self, keep_last: int = 2, **settings: Any) -> Committer:
        """Return the committer of a new incarnation after the master's clean-up."""
        writer = begin(History(self.paths.history), {})
        __main__._clean(self.paths, self.state)
        channel = cast(WorkerChannel, self.channel)
        checkpoint = Checkpoint(keep_last=keep_last, **settings)
        return Committer(self.paths, writer, channel, self.state.commits, checkpoint, 10.0)

    @property
    def state(self) -> TrialState:
        return fold(History(self.paths.history).read())

    @property
    def on_disk(self) -> list[str]:
        return sorted(entry.name for entry in self.paths.checkpoints.iterdir())

    def check(self) -> int | None:
        """Check that all commits in the history are complete. Return the step of the newest one."""
        for commit in self.state.commits:
            directory = self.paths.checkpoints / commit.directory
            assert verify(directory).step == commit.step
            assert read_state(directory) == {"step": commit.step}
        last = self.state.last_commit
        return last.step if last else None


@pytest.fixture
def trial(paths: RunPaths) -> Trial:
    return Trial(paths)


def save(committer: Committer, step: int, *, asynchronous: bool = False) -> Outcome:
    """Save one checkpoint from its start to its end."""
    outcome = committer.start(step, {"step": step}, asynchronous=asynchronous)
    outcome = outcome or committer.wait()
    assert outcome is not None
    return outcome


def commit(committer: Committer, *steps: int) -> None:
    for step in steps:
        outcome = save(committer, step)
        assert outcome.error is None


def test_commit_is_complete_and_recorded(trial: Trial) -> None:
    committer = trial.committer()
    assert committer.last_step is None
    commit(committer, 3)
    assert committer.last_step == 3
    assert trial.check() == 3
    assert trial.on_disk == ["step-00000003.1"]
    assert trial.channel.posted == [Save(step=3, directory="step-00000003.1")]
    manifest = verify(trial.paths.checkpoint(3, 1))
    names = [file.name for file in manifest.files]
    assert names == ["actor.0.safetensors", "actor.1.safetensors", "state.json"]


def test_oldest_commits_are_deleted_after_their_record(
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


def test_every_nth_step_is_kept_permanently(trial: Trial) -> None:
    committer = trial.committer(keep_last=1, keep_every_steps=4)
    commit(committer, *range(2, 12, 2))
    assert [one.step for one in trial.state.commits] == [4, 8, 10]
    later = trial.committer(keep_last=2, keep_every_steps=4)
    assert later.last_step == 10
    commit(later, 12, 14, 16)
    assert [one.step for one in trial.state.commits] == [4, 8, 12, 14, 16]
    trial.check()


def test_nothing_is_committed_before_all_ranks_have_saved(trial: Trial) -> None:
    committer = trial.committer()
    state = {"step": 3}
    assert committer.start(3, state, asynchronous=True) is None
    state["step"] = 99  # the run goes on
    for _ in range(3):
        assert committer.poll() is None
    assert trial.check() is None
    outcome = committer.wait()
    assert outcome is not None
    assert (outcome.step, outcome.error) == (3, None)
    assert 0 < outcome.stall_s <= outcome.seconds
    assert trial.check() == 3
    assert committer.wait() is None
    assert committer.poll() is None


def test_older_commits_are_kept_if_ranks_cannot_write(trial: Trial) -> None:
    committer = trial.committer()
    commit(committer, 1)
    trial.channel.errors = {1: "cannot write x: quota"}
    outcome = save(committer, 2)
    assert outcome.error == "rank 1: cannot write x: quota"
    assert trial.check() == 1
    assert trial.on_disk == ["step-00000001.1"], "what was written goes at once"
    trial.channel.errors = {}
    commit(committer, 2)
    assert trial.check() == 2


def test_quarantined_checkpoint_is_removed_if_a_save_lacks_space(trial: Trial) -> None:
    committer = trial.committer(keep_last=2)
    commit(committer, 1, 3)
    trial.paths.damaged_checkpoint("step-00000002.0").mkdir()
    trial.channel.errors = {0: "no space"}
    assert save(committer, 7).error == "rank 0: no space"
    assert trial.on_disk == ["step-00000001.1", "step-00000003.1"]


class Refusing(SystemCalls):
    """File operations that cannot make or link files in some directories."""

    def __init__(self) -> None:
        self.refused: dict[str, int] = {}
        """Errors by a part of the path."""
        self.late = False
        """The link is made, and the answer is an error all the same."""

    def link(self, source: Path, target: Path) -> None:
        number = self._number(target)
        if self.late or not number:
            super().link(source, target)
        if number:
            raise OSError(number, os.strerror(number))

    def mkdir(self, path: Path, mode: int = 0o700) -> None:
        if number := self._number(path):
            raise OSError(number, os.strerror(number))
        super().mkdir(path, mode)

    def rename(self, source: Path, target: Path) -> None:
        if number := self._number(target):
            raise OSError(number, os.strerror(number))
        super().rename(source, target)

    def read(self, descriptor: int, count: int) -> bytes:
        if self.late and self.refused.pop("read", 0):
            raise OSError(errno.EIO, "lost")
        return super().read(descriptor, count)

    def sleep(self, seconds: float) -> None:
        pass

    def _number(self, path: Path) -> int:
        return next((n for part, n in self.refused.items() if part in str(path)), 0)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Refusing:
    """Replace the real file operations everywhere."""
    calls = Refusing()
    for name in ("link", "mkdir", "rename", "read", "sleep"):
        monkeypatch.setattr(SystemCalls, name, wrapped(calls, name, getattr(SystemCalls, name)))
    return calls


def wrapped(calls: Refusing, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: SystemCalls, *arguments: Any) -> Any:
        chosen = real if self is calls else getattr(Refusing, name)
        return chosen(calls, *arguments)

    return call


@pytest.mark.parametrize("what", ["checkpoints/", "manifest.json", "state.json", "history/"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_at_any_point_leaves_a_usable_commit(
    trial: Trial, refusing: Refusing, what: str, number: int
) -> None:
    committer = trial.committer(keep_last=2)
    commit(committer, 1, 2)
    refusing.refused = {what: number}
    outcome = save(committer, 3)
    assert outcome.error is not None
    assert errno.errorcode[number] in outcome.error
    refusing.refused = {}
    assert [one.step for one in trial.state.commits] == [1, 2]
    assert trial.check() == 2
    assert len(trial.on_disk) == 2
    commit(committer, 4)
    assert trial.check() == 4


def test_commit_record_written_without_a_reply_is_valid(trial: Trial, refusing: Refusing) -> None:
    """The link was made, its reply was lost, and the check of the link failed too."""
    committer = trial.committer()
    refusing.late, refusing.refused = True, {"history/": errno.EIO, "read": 1}
    assert committer.start(1, {"step": 1}, asynchronous=False) is None
    outcome = committer.wait()
    assert outcome is not None
    assert outcome.error is None
    refusing.refused = {}
    assert trial.check() == 1
    kinds = [record.kind for record in History(trial.paths.history).read()]
    assert kinds == [Kind.BEGIN, Kind.COMMIT]


def test_failed_rank_leaves_no_commit(trial: Trial) -> None:
    committer = trial.committer()
    commit(committer, 1)
    trial.channel.error = RuntimeError("rank 1 is gone")
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
