"""The file server crashes after any operation: data without fsync may be lost, acknowledged data
may not. Tests with SIGKILL cannot show this, because the page cache survives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurmrl.errors import CorruptFileError, NameExistsError, SlotTakenError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import SystemCalls, write_new
from slurmrl.name_resolve.store import NameStore
from slurmrl.rollouts.sample_files import SampleWriter, read_group
from slurmrl.run.channel.message_log import LogReader, LogWriter
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import begin, end, fold
from slurmrl.tensors.checkpoint.manifest import verify, write_manifest
from slurmrl.tensors.checkpoint.tensors import SavedFile
from slurmrl.tensors.weights.format import VersionId
from slurmrl.tensors.weights.inventory import inventory
from slurmrl.tensors.weights.writer import PartWriter, VersionBits, publish
from slurmrl.workers.rollout_messages import RESULT_LOG, GroupsFinished
from tests.support.disk import Directory, Disk, DiskCalls, Tree, drop_all, keep_all, some, write_out
from tests.support.faulty import Faulty
from tests.support.sample_groups import small_group

SEEDS = 4
Acknowledge = Callable[..., None]


@dataclass
class Crash:
    """The disk after an operation, and the values acknowledged by then."""

    at: str
    tree: Tree
    acknowledged: list[tuple[Any, ...]]


@dataclass
class Recording:
    """Runs a protocol on a simulated disk that crashes after every operation, in several ways."""

    crashes: list[Crash] = field(default_factory=list)
    acknowledged: list[tuple[Any, ...]] = field(default_factory=list)

    def run(self, protocol: Callable[[Path, SystemCalls, Acknowledge], None]) -> None:
        disk = Disk()
        root = disk.root / "root"
        disk.top.entries["root"] = disk.top.safe["root"] = Directory()
        calls = DiskCalls(disk, lambda name: self._crash(disk, name))
        protocol(root, calls, lambda *what: self.acknowledged.append(what))
        self._crash(disk, "the end")

    def _crash(self, disk: Disk, name: str) -> None:
        number = len(self.crashes)
        choices = [drop_all, keep_all, *(some((number, seed)) for seed in range(SEEDS))]
        for keep in choices:
            tree = disk.crash(keep)["root"]
            self.crashes.append(Crash(f"{number} {name}", tree, list(self.acknowledged)))

    def check(self, tmp_path: Path, check: Callable[[Path, list[tuple[Any, ...]]], None]) -> None:
        for number, crash in enumerate(self.crashes):
            folder = tmp_path / str(number)
            write_out(crash.tree, folder)
            try:
                check(folder, crash.acknowledged)
            except Exception as error:
                raise AssertionError(f"after {crash.at}: {error!r}; {crash.tree}") from error


def whole(value: str) -> bytes:
    """Return content from which a missing part can be detected."""
    return f"{value} {hashlib.sha256(value.encode()).hexdigest()}".encode()


def checked(data: bytes) -> str:
    value = data.decode().partition(" ")[0]
    assert data == whole(value), f"torn: {data!r}"
    return value


# -- protocols ---------------------------------------------------------------------------------


def create(root: Path, calls: SystemCalls, acknowledge: Acknowledge) -> None:
    for number in range(3):
        assert atomic.exclusive_create(root / f"{number}", whole(f"v{number}"), calls=calls)
        acknowledge(number)
        assert not atomic.exclusive_create(root / f"{number}", whole("other"), calls=calls)


def check_create(folder: Path, acknowledged: list[tuple[Any, ...]]) -> None:
    found = {name: checked((folder / name).read_bytes()) for name in atomic.list_names(folder)}
    assert all(value == f"v{name}" for name, value in found.items())
    assert {str(number) for (number,) in acknowledged} <= found.keys()


def rewrite(root: Path, calls: SystemCalls, acknowledge: Acknowledge) -> None:
    for number in range(4):
        atomic.replace(root / "a", whole(str(number)), calls=calls)
        acknowledge(number)


def check_rewrite(folder: Path, acknowledged: list[tuple[Any, ...]]) -> None:
    path = folder / "a"
    least = acknowledged[-1][0] if acknowledged else -1
    found = int(checked(path.read_bytes())) if path.exists() else -1
    assert least <= found <= least + 1


def name(root: Path, calls: SystemCalls, acknowledge: Acknowledge) -> None:
    one, two = NameStore(root, calls=calls), NameStore(root, calls=calls)
    one.add("a", "1")
    acknowledge("a", "1")
    with suppress(NameExistsError):
        two.add("a", "2")
        pytest.fail("two winners")
    two.add("a/b", "3", replace=True)
    acknowledge("a/b", "3")
    one.add("a/b", "4", replace=True)
    acknowledge("a/b", "4")


def check_name(folder: Path, acknowledged: list[tuple[Any, ...]]) -> None:
    store = NameStore(folder)
    told = dict(acknowledged)
    found = {key: store.get(key) for key in store.find_subtree("")}
    assert found.get("a", "1") == "1"
    assert told.keys() <= found.keys()
    assert int(found.get("a/b", 3)) >= int(told.get("a/b", 3))


def lead(root: Path, calls: SystemCalls, acknowledge: Acknowledge) -> None:
    """Run two masters and a cancel, which take turns."""
    one = begin(History(root, calls=calls), {"by": 1})
    acknowledge(Kind.BEGIN, 1)
    one.append(Kind.COMMIT, {"step": 1, "directory": "step-1.1"})
    acknowledge(Kind.COMMIT, 1)
    two = begin(History(root, calls=calls), {"by": 2})
    acknowledge(Kind.BEGIN, 2)
    two.append(Kind.COMMIT, {"step": 2, "directory": "step-2.2"})
    acknowledge(Kind.COMMIT, 2)
    two.append(Kind.DELETE, {"step": 1, "directory": "step-1.1"})
    acknowledge(Kind.DELETE, 2)
    end(History(root, calls=calls), Kind.CANCELLED, {})
    acknowledge(Kind.CANCELLED, 2)


def check_lead(folder: Path, acknowledged: list[tuple[Any, ...]]) -> None:
    records = [(record.kind, record.incarnation) for record in History(folder).read()]
    assert records[: len(acknowledged)] == acknowledged
    assert len(records) <= len(acknowledged) + 1
    fold(History(folder).read())


def race(root: Path, calls: SystemCalls, acknowledge: Acknowledge) -> None:
    """A writer has linked slot n without knowing it. Slot n + 1 is acknowledged."""

    class Paused(SystemCalls):
        """Stops permanently after its link, before the directory is synced."""

        def __getattribute__(self, called: str) -> Any:
            return getattr(calls, called)

    paused: Any = Paused()
    slow = DiskCallsWithoutDirectorySync(paused)
    History(root, calls=slow).append(Kind.EXPORT, 0, {"step": 1, "directory": "one"}, after=-1)
    records = History(root, calls=calls).read()
    with suppress(SlotTakenError):
        History(root, calls=calls).append(
            Kind.EXPORT, 0, {"step": 2, "directory": "two"}, after=len(records) - 1
        )
        acknowledge(1)


class DiskCallsWithoutDirectorySync(SystemCalls):
    def __init__(self, calls: SystemCalls) -> None:
        self._calls = calls

    def __getattribute__(self, called: str) -> Any:
        calls = super().__getattribute__("_calls")
        if called == "fsync_directory":
            return lambda directory: None
        return getattr(calls, called)


def check_race(folder: Path, acknowledged: list[tuple[Any, ...]]) -> None:
    records = History(folder).read()
    assert not acknowledged or len(records) == 2


def log(root: Path, calls: SystemCalls, acknowledge: Acknowledge) -> None:
    writer = LogWriter(root / "log", calls=calls, durable=True, segment_bytes=200)
    for number in range(8):
        writer.append({"n": number, "padding": "p" * 30})
        acknowledge(number)


def check_log(folder: Path, acknowledged: list[tuple[Any, ...]]) -> None:
    found = [message["n"] for message in LogReader(folder / "log").read()]
    assert found == list(range(len(found)))
    assert len(acknowledged) <= len(found) <= len(acknowledged) + 1


def commit(root: Path, calls: SystemCalls, acknowledge: Acknowledge) -> None:
    """Write the files of the ranks, then the committer's, in a new folder each time."""
    for folder in (root / "history", root / "checkpoints"):
        atomic.make_private_directory(folder, calls=calls)
    writer = begin(History(root / "history", calls=calls), {})
    acknowledge(0)
    for step in (1, 2):
        directory = root / "checkpoints" / f"step-{step}"
        atomic.make_private_directory(directory, calls=calls)
        files = []
        for rank in range(2):
            data = whole(f"rank{rank}")
            write_new(directory / f"actor.{rank}", data, True, calls)
            checksum = f"sha256:{hashlib.sha256(data).hexdigest()}"
            files.append(SavedFile(f"actor.{rank}", len(data), checksum))
        write_manifest(directory, step=step, files=files, state={"step": step}, calls=calls)
        writer.append(Kind.COMMIT, {"step": step, "directory": directory.name})
        acknowledge(step)


def check_commit(folder: Path, acknowledged: list[tuple[Any, ...]]) -> None:
    state = fold(History(folder / "history").read())
    assert state.incarnation >= bool(acknowledged), "the history itself is gone"
    steps = [found.step for found in state.commits]
    assert steps == [1, 2][: len(steps)]
    assert len(steps) >= len(acknowledged) - 1
    for found in state.commits:
        verify(folder / "checkpoints" / found.directory)


def submit(root: Path, calls: SystemCalls, acknowledge: Acknowledge) -> None:
    """Make the directories and claims of a submission."""
    run = root / "user" / "experiment" / "1"
    atomic.make_private_directory(run / "submissions", calls=calls)
    atomic.exclusive_create(run / "trial.json", whole("uuid"), calls=calls)
    atomic.make_private_directory(run / "submissions" / "1", calls=calls)
    atomic.exclusive_create(run / "submissions" / "1" / "request.json", whole("1"), calls=calls)
    acknowledge("submitted")


def check_submit(folder: Path, acknowledged: list[tuple[Any, ...]]) -> None:
    run = folder / "user" / "experiment" / "1"
    if acknowledged:
        assert checked((run / "trial.json").read_bytes()) == "uuid"
        assert checked((run / "submissions" / "1" / "request.json").read_bytes()) == "1"


def publish_weights(root: Path, calls: SystemCalls, acknowledge: Acknowledge) -> None:
    """Publish a whole version, and a difference from it."""
    base: VersionBits | None = None
    for step in (1, 2):
        version = VersionId(step, 1)
        folder = root / "versions" / version.name
        writer = PartWriter(folder, 0, base, calls=calls)
        bits = np.arange(step, step + 64).astype(np.uint8)
        for name in ("a", "b"):
            writer.add(name, "bfloat16", (32,), bits)
        before = None if base is None else base.version
        publish(folder, [writer.finish()], version, before, calls=calls)
        acknowledge(step)
        base = VersionBits(version, {"a": bits, "b": bits})


def check_weights(folder: Path, acknowledged: list[tuple[Any, ...]]) -> None:
    versions = folder / "versions"
    found = inventory(versions, verify=True) if versions.exists() else []
    complete = [one.step for one in found if one.state == "complete"]
    assert complete == [1, 2][: len(complete)]
    assert len(acknowledged) <= len(complete) <= len(acknowledged) + 1
    assert {one.state for one in found} <= {"complete", "unfinished"}


def record_samples(root: Path, calls: SystemCalls, acknowledge: Acknowledge) -> None:
    """Write files of two groups of samples as a task does, and a record of each."""
    writer = SampleWriter(root / "samples", calls=calls)
    results = LogWriter(root / "results", durable=True, calls=calls)
    for first in (0, 2):
        stored = writer.write([small_group(first), small_group(first + 1)])
        results.append(RESULT_LOG.to_json(GroupsFinished(groups=stored)))
        acknowledge(first)


def check_samples(folder: Path, acknowledged: list[tuple[Any, ...]]) -> None:
    records = [RESULT_LOG.from_json(values) for values in LogReader(folder / "results").read()]
    stored = [one for each in records if isinstance(each, GroupsFinished) for one in each.groups]
    hasty = Faulty()  # does not wait for what is missing
    items = [read_group(folder / "samples", one, calls=hasty).item for one in stored]
    assert items == [0, 1, 2, 3][: len(items)]
    assert len(items) >= 2 * len(acknowledged)


PROTOCOLS = {
    "exclusive create": (create, check_create),
    "replace": (rewrite, check_rewrite),
    "names": (name, check_name),
    "history": (lead, check_lead),
    "history, unheard": (race, check_race),
    "log": (log, check_log),
    "commit": (commit, check_commit),
    "submission": (submit, check_submit),
    "weights": (publish_weights, check_weights),
    "samples": (record_samples, check_samples),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_crash_after_any_operation_loses_no_acknowledged_write(
    protocol: str, tmp_path: Path
) -> None:
    run, check = PROTOCOLS[protocol]
    recording = Recording()
    recording.run(run)
    assert len(recording.crashes) > 30
    recording.check(tmp_path, check)


# -- a missing fsync is found --------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["fsync", "fsync_directory"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_crash_test_detects_a_missing_fsync(
    protocol: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, check = PROTOCOLS[protocol]
    monkeypatch.setattr(DiskCalls, missing, lambda self, target: None)
    recording = Recording()
    recording.run(run)
    with pytest.raises(AssertionError, match="after "):
        recording.check(tmp_path, check)


def test_non_durable_log_shows_only_complete_messages(tmp_path: Path) -> None:
    """Without fsync, a crash may lose messages, but a reader never returns partial frames."""

    def run(root: Path, calls: SystemCalls, acknowledge: Acknowledge) -> None:
        writer = LogWriter(root / "log", calls=calls)
        for number in range(3):
            writer.append({"n": number})

    def check(folder: Path, acknowledged: list[tuple[Any, ...]]) -> None:
        with suppress(CorruptFileError):
            found = [message["n"] for message in LogReader(folder / "log").read()]
            assert found == list(range(len(found)))

    recording = Recording()
    recording.run(run)
    recording.check(tmp_path, check)
