"""The commit that an incarnation resumes from when files are damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slurmrl.backoff import HIDDEN_PAUSES_S, retry
from slurmrl.errors import DamagedCheckpointError, EnvironmentFailure, StaleIncarnationError
from slurmrl.fsio.calls import SystemCalls
from slurmrl.name_resolve.store import NameStore, encode
from slurmrl.run import events, keys
from slurmrl.run.events import EventWriter
from slurmrl.run.history.slots import History, Kind, Record
from slurmrl.run.history.state import IncarnationWriter, TrialState, begin, fold
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Failure
from slurmrl.tensors.checkpoint.manifest import write_manifest
from slurmrl.tensors.checkpoint.tensors import SavedFile, checksum
from slurmrl.watch import published
from slurmrl.workers.failure import failure_of, publish
from slurmrl.workers.master import __main__
from slurmrl.workers.master import committer as base_module
from slurmrl.workers.master.committer import Damage, begin_on_base, choose, set_aside
from slurmrl.workers.master.futility import futile_start


class Past:
    """A trial with commits of steps 2, 4 and 6, all by incarnation 1."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.names = NameStore(paths.names)
        self.history = History(paths.history)
        self.writer = begin(self.history, {})
        for step in (2, 4, 6):
            self.commit(step)

    @property
    def state(self) -> TrialState:
        return fold(self.history.read())

    @property
    def on_disk(self) -> list[str]:
        return sorted(entry.name for entry in self.paths.checkpoints.iterdir())

    def directory(self, step: int, incarnation: int = 1) -> Path:
        return self.paths.checkpoint(step, incarnation)

    def commit(self, step: int) -> None:
        directory = self.directory(step, self.writer.incarnation)
        directory.mkdir()
        path = directory / "actor.0.safetensors"
        path.write_bytes(b"x" * 100)
        with path.open("rb") as file:
            saved = SavedFile(path.name, 100, checksum(file))
        write_manifest(directory, step=step, files=[saved], state={"step": step})
        self.writer.append(Kind.COMMIT, {"step": step, "directory": directory.name})

    def truncate(self, step: int) -> None:
        (self.directory(step) / "actor.0.safetensors").write_bytes(b"x" * 99)

    def begin(self) -> tuple[IncarnationWriter, list[Damage]]:
        """Begin an incarnation like `serve`."""
        writer, damages = begin_on_base(
            self.paths, self.names, self.history, {"job": "1"}, lambda records: None
        )
        self.writer = writer
        set_aside(self.paths, writer, damages, EventWriter(self.paths, "master"))
        __main__._clean(self.paths, self.state)
        return writer, damages


@pytest.fixture
def past(paths: RunPaths) -> Past:
    return Past(paths)


def test_newest_commit_is_the_base(past: Past) -> None:
    _, damages = past.begin()
    assert damages == []
    assert past.state.base == past.directory(6).name
    assert past.state.begin_data == {"job": "1", "base": past.directory(6).name}


@pytest.mark.parametrize("what", ["short", "gone", "manifest", "state", "all"])
def test_damaged_commit_is_skipped_deleted_and_quarantined(past: Past, what: str) -> None:
    newest = past.directory(6)
    if what == "short":
        past.truncate(6)
    elif what == "gone":
        (newest / "actor.0.safetensors").unlink()
    elif what == "manifest":
        (newest / "manifest.json").write_bytes((newest / "manifest.json").read_bytes()[:30])
    elif what == "state":
        (newest / "state.json").write_text('{"step": 7}\n')
    else:
        newest.rename(past.paths.run / "elsewhere")
    _, damages = past.begin()
    assert [damage.commit.step for damage in damages] == [6]
    state = past.state
    assert state.base == past.directory(4).name
    assert state.last_commit is not None
    assert state.last_commit.step == 4
    deleted = [r for r in past.history.read() if r.kind is Kind.DELETE]
    assert [record.data["directory"] for record in deleted] == [newest.name]
    assert deleted[0].data["reason"] == damages[0].reason
    kept = [] if what == "all" else [f"damaged-{newest.name}"]
    assert past.on_disk == sorted([*kept, past.directory(2).name, past.directory(4).name])
    told = events.read_all(past.paths)
    assert [(event["kind"], event["step"]) for event in told] == [("damaged", 6)]
    past.begin()
    assert past.on_disk[: len(kept)] == kept, "nothing was committed since"
    past.commit(6)
    past.begin()
    assert not past.paths.damaged_checkpoints()
    assert past.state.base == past.directory(6, 3).name


def test_trial_starts_from_scratch_without_a_usable_commit(past: Past) -> None:
    for step in (2, 4, 6):
        past.truncate(step)
    _, damages = past.begin()
    assert [damage.commit.step for damage in damages] == [6, 4, 2]
    assert past.state.base is None
    assert past.state.commits == ()


def test_damage_reported_by_ranks_is_accepted(past: Past) -> None:
    said: dict[str, Any] = {"damaged": past.directory(6).name, "exception": "another checksum"}
    past.names.add(keys.failure(1), json.dumps(said))
    _, damages = past.begin()
    assert [damage.reason for damage in damages] == ["another checksum"]
    assert past.state.base == past.directory(4).name


def test_damage_found_by_an_export_is_accepted(past: Past) -> None:
    error = DamagedCheckpointError("actor.0 has another checksum", past.directory(6).name)
    publish(past.names, 1, failure_of(error, "master"))
    _, damages = past.begin()
    assert [damage.reason for damage in damages] == ["master: actor.0 has another checksum"]
    assert past.state.base == past.directory(4).name


def test_damaged_commit_is_found_again_if_deletion_was_killed(past: Past) -> None:
    said = {"damaged": past.directory(6).name, "exception": "another checksum"}
    past.names.add(keys.failure(1), json.dumps(said))
    begin_on_base(past.paths, past.names, past.history, {}, lambda records: None)
    assert past.state.base == past.directory(4).name, "the agents take it from BEGIN"
    _, damages = past.begin()
    assert [damage.commit.step for damage in damages] == [6]


def test_stale_incarnation_quarantines_nothing(past: Past) -> None:
    past.truncate(6)
    writer, damages = begin_on_base(past.paths, past.names, past.history, {}, lambda records: None)
    begin(past.history, {})
    with pytest.raises(StaleIncarnationError):
        set_aside(past.paths, writer, damages, EventWriter(past.paths, "master"))
    assert past.directory(6).is_dir()
    assert len(past.state.commits) == 3


def test_damage_is_checked_again_if_caches_may_be_stale(
    past: Past, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale file size in a cache must not make a good checkpoint count as damaged."""
    monkeypatch.setattr(SystemCalls, "caches", lambda self, directory: True)
    path = past.directory(6) / "actor.0.safetensors"
    past.truncate(6)
    slept = [0.0]

    def sleep(seconds: float) -> None:
        slept[0] += seconds
        if slept[0] >= 30:  # the cache has expired
            path.write_bytes(b"x" * 100)

    assert choose(past.paths, past.names, past.state, sleep) == (past.directory(6).name, [])
    past.truncate(6)
    slept[0] = -1000.0
    _, damages = choose(past.paths, past.names, past.state, sleep)
    assert len(damages) == 1
    assert slept[0] + 1000 == pytest.approx(sum(HIDDEN_PAUSES_S))


def test_unreachable_directory_is_not_damage(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(self: SystemCalls, path: Path, flags: int, mode: int = 0o600) -> int:
        raise OSError(13, "Permission denied")

    state = past.state
    monkeypatch.setattr(SystemCalls, "open", stale)
    with pytest.raises(EnvironmentFailure):
        choose(past.paths, past.names, state, lambda seconds: None)


@pytest.mark.parametrize("empty", [False, True], ids=["gone", "unmounted"])
def test_checkpoints_on_a_temporarily_missing_mount_are_kept(
    past: Past, monkeypatch: pytest.MonkeyPatch, empty: bool
) -> None:
    """A master that starts meanwhile waits, and resumes from the newest commit."""
    checkpoints = past.paths.checkpoints
    away = checkpoints.rename(checkpoints.with_name("away"))
    if empty:
        checkpoints.mkdir()
    before = past.history.count()
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        assert past.history.count() == before, "nothing begins without its base"
        pauses.append(seconds)
        if len(pauses) == 3:
            if empty:
                checkpoints.rmdir()
            away.rename(checkpoints)

    monkeypatch.setattr(base_module, "retry", partial(retry, pause=pause))
    _, damages = past.begin()
    assert damages == []
    assert past.state.base == past.directory(6).name
    assert len(past.state.commits) == 3
    assert past.on_disk == [past.directory(step).name for step in (2, 4, 6)]


@pytest.mark.parametrize("key", [keys.failure, keys.hang, keys.warned])
@pytest.mark.parametrize("content", [b"", b"\0", b"[]", b'{"value": "{", "nonce": "1"}', b"FIFO"])
def test_damaged_report_of_a_past_incarnation_is_ignored(
    past: Past, key: Callable[[int], str], content: bytes
) -> None:
    """The next incarnation begins, on the newest commit."""
    if key is keys.hang:  # it is read after hangs only
        publish(past.names, 1, Failure(cause="hung", reason="rank 1 is silent"))
    path = past.paths.names / encode(key(1))
    if content == b"FIFO":
        os.mkfifo(path)
    else:
        path.write_bytes(content)

    def verdict(records: list[Record]) -> dict[str, Any] | None:
        found = futile_start(records, past.names, "2.0.0", 3)
        return found.data if found is not None else None

    begin_on_base(past.paths, past.names, past.history, {"job": "2.0.0"}, verdict)
    assert (past.state.incarnation, past.state.base) == (2, past.directory(6).name)
    assert published.failure(past.names, 1) is not None or key is keys.warned
