"""Each operation of the file layer fails in turn. The result is a typed error or a retry, and never
a wrong value.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurmrl.errors import (
    EnvironmentFailure,
    NameExistsError,
    SampleFileError,
    SlurmrlError,
    WeightVersionError,
)
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.name_resolve.store import NameStore
from slurmrl.rollouts.sample_files import SampleWriter, read_group
from slurmrl.run.channel.message_log import LogReader, LogWriter
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import begin, end, fold
from slurmrl.run.lease import Lease, LeaseObserver, read_counter
from slurmrl.tensors.checkpoint.manifest import verify, write_manifest
from slurmrl.tensors.weights.format import VersionId
from slurmrl.tensors.weights.inventory import inventory, prune
from slurmrl.tensors.weights.writer import PartWriter, VersionBits, publish
from slurmrl.workers.rollout_messages import RESULT_LOG, GroupsFinished
from tests.support.faulty import REPEATED, Clock, Faulty
from tests.support.sample_groups import small_group

ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES),
    *(errno.EIO, errno.ESTALE, errno.EINTR, errno.ETIMEDOUT),
)
UNCLEAR = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
"""Errors after which the operation may have happened."""
OLD, NEW = b"old content", b"new content"


@dataclass
class Result:
    """The values that a protocol acknowledged, and the error that ended it."""

    done: list[Any] = field(default_factory=list)
    error: BaseException | None = None


class Protocol:
    """A protocol on a faulty file layer, and the conditions that must hold afterwards."""

    errors: tuple[type[BaseException], ...] = (EnvironmentFailure,)
    gives_up = False
    """The protocol leaves retries to its caller."""

    def prepare(self, folder: Path) -> None:
        """Prepare the protocol on a file layer without faults."""

    def act(self, folder: Path, calls: SystemCalls, done: list[Any]) -> None:
        raise NotImplementedError

    def check(self, folder: Path, result: Result) -> None:
        raise NotImplementedError


class ExclusiveCreate(Protocol):
    def act(self, folder: Path, calls: SystemCalls, done: list[Any]) -> None:
        done.append(atomic.exclusive_create(folder / "a", NEW, calls=calls))

    def check(self, folder: Path, result: Result) -> None:
        found = _content(folder / "a")
        assert result.done in ([True], []), "nobody else was there"
        assert found == NEW if result.done else found in (None, NEW)


class ExclusiveCreateTaken(Protocol):
    def prepare(self, folder: Path) -> None:
        atomic.replace(folder / "a", OLD)

    def act(self, folder: Path, calls: SystemCalls, done: list[Any]) -> None:
        done.append(atomic.exclusive_create(folder / "a", NEW, calls=calls))

    def check(self, folder: Path, result: Result) -> None:
        assert result.done in ([False], [])
        assert _content(folder / "a") == OLD


class Replace(Protocol):
    def prepare(self, folder: Path) -> None:
        atomic.replace(folder / "a", OLD)

    def act(self, folder: Path, calls: SystemCalls, done: list[Any]) -> None:
        atomic.replace(folder / "a", NEW, calls=calls)
        done.append(NEW)

    def check(self, folder: Path, result: Result) -> None:
        assert _content(folder / "a") in ((NEW,) if result.done else (OLD, NEW))


class Read(Replace):
    def act(self, folder: Path, calls: SystemCalls, done: list[Any]) -> None:
        done.append(atomic.read(folder / "a", calls=calls))
        done.append(atomic.list_names(folder, calls=calls))

    def check(self, folder: Path, result: Result) -> None:
        assert result.done == [OLD, ["a"]][: len(result.done)]


class Remove(Replace):
    gives_up = True

    def act(self, folder: Path, calls: SystemCalls, done: list[Any]) -> None:
        done.append(atomic.remove(folder / "a", calls=calls))

    def check(self, folder: Path, result: Result) -> None:
        assert _content(folder / "a") in ((None,) if result.done else (OLD, None))


class MakeDirectory(Protocol):
    gives_up = True

    def act(self, folder: Path, calls: SystemCalls, done: list[Any]) -> None:
        atomic.make_private_directory(folder / "b" / "c", calls=calls)
        done.append("made")

    def check(self, folder: Path, result: Result) -> None:
        if result.done:
            assert (folder / "b" / "c").is_dir()


class Sweep(Protocol):
    gives_up = True

    def prepare(self, folder: Path) -> None:
        for number in range(2):
            (folder / f".tmp.{number}").touch()
        atomic.replace(folder / "a", OLD)

    def act(self, folder: Path, calls: SystemCalls, done: list[Any]) -> None:
        done.append(atomic.sweep_temporaries(folder, calls=calls))

    def check(self, folder: Path, result: Result) -> None:
        assert _content(folder / "a") == OLD
        if result.done:
            assert os.listdir(folder) == ["a"]


class Names(Protocol):
    def act(self, folder: Path, calls: SystemCalls, done: list[Any]) -> None:
        store = NameStore(folder, calls=calls)
        store.add("a", "1")
        done.append("a")
        assert store.get("a") == "1"
        with suppress(NameExistsError):
            store.add("a", "2")
            pytest.fail("two winners")
        store.add("s", "1", replace=True)
        store.add("s", "2", replace=True)
        done.append("s")
        assert store.get_subtree("") == ["1", "2"]

    def check(self, folder: Path, result: Result) -> None:
        names = NameStore(folder)
        values = {key: names.get(key) for key in names.find_subtree("")}
        assert set(values.values()) <= {"1", "2"}
        if "s" in result.done:
            assert values["s"] == "2"
        if "a" in result.done:
            assert values["a"] == "1"


class AppendHistory(Protocol):
    def act(self, folder: Path, calls: SystemCalls, done: list[Any]) -> None:
        history = History(folder, calls=calls)
        writer = begin(history, {})
        done.append((Kind.BEGIN, writer.incarnation))
        for step in (1, 2):
            writer.append(Kind.COMMIT, {"step": step, "directory": f"step-{step}"})
            done.append((Kind.COMMIT, step))
        end(history, Kind.CANCELLED, {})
        done.append((Kind.CANCELLED, 0))

    def check(self, folder: Path, result: Result) -> None:
        records = History(folder).read()
        assert len(result.done) <= len(records) <= len(result.done) + 1
        assert [kind for kind, _ in result.done] == [r.kind for r in records][: len(result.done)]
        fold(records)
        if fold(records).end is None:
            assert begin(History(folder), {}).incarnation == (2 if records else 1)


class Log(Protocol):
    errors = (EnvironmentFailure, FileExistsError)
    """A log whose creation was repeated by the client looks like another writer's."""

    def act(self, folder: Path, calls: SystemCalls, done: list[Any]) -> None:
        writer = LogWriter(folder / "log", calls=calls, durable=True)
        reader = LogReader(folder / "log")
        seen: list[Any] = []
        for number in range(3):
            with suppress(EnvironmentFailure):  # stays queued
                writer.append({"n": number})
            seen += [message["n"] for message in reader.read()]
        writer.append()
        seen += [message["n"] for message in reader.read()]
        done.extend(seen)
        assert seen == [0, 1, 2]

    def check(self, folder: Path, result: Result) -> None:
        assert result.done in ([0, 1, 2], [])


class FollowLog(Protocol):
    def prepare(self, folder: Path) -> None:
        LogWriter(folder / "log").append({"n": 0}, {"n": 1})

    def act(self, folder: Path, calls: SystemCalls, done: list[Any]) -> None:
        reader = LogReader(folder / "log", calls=calls)
        for _ in range(3):
            with suppress(EnvironmentFailure):
                done.extend(message["n"] for message in reader.read())
        if isinstance(calls, Faulty) and calls.times == 1:
            assert done == [0, 1]

    def check(self, folder: Path, result: Result) -> None:
        assert result.done in ([0, 1], [])


class Beat(Protocol):
    gives_up = True

    def act(self, folder: Path, calls: SystemCalls, done: list[Any]) -> None:
        lease = Lease(folder / "lease", calls=calls)
        for number in range(1, 4):
            lease.beat()
            done.append(number)

    def check(self, folder: Path, result: Result) -> None:
        counter = read_counter(folder / "lease") or 0
        assert len(result.done) <= counter <= len(result.done) + 1


class ReadCounter(Protocol):
    gives_up = True

    def prepare(self, folder: Path) -> None:
        Lease(folder / "lease").beat()

    def act(self, folder: Path, calls: SystemCalls, done: list[Any]) -> None:
        done.append(read_counter(folder / "lease", calls=calls))

    def check(self, folder: Path, result: Result) -> None:
        assert result.done in ([1], [])


class WriteManifest(Protocol):
    def prepare(self, folder: Path) -> None:
        (folder / "step").mkdir()

    def act(self, folder: Path, calls: SystemCalls, done: list[Any]) -> None:
        write_manifest(folder / "step", step=1, files=[], state={"step": 1}, calls=calls)
        done.append(1)

    def check(self, folder: Path, result: Result) -> None:
        if result.done or (folder / "step" / "manifest.json").exists():
            assert verify(folder / "step").step == 1


def _tensors(step: int) -> dict[str, Any]:
    return dict.fromkeys("ab", np.arange(step, step + 64).astype(np.uint8))


class PublishWeights(Protocol):
    """Publishes a difference from a whole version. A failed `listdir` or `open` may hide
    the base.
    """

    errors = (EnvironmentFailure, WeightVersionError)

    def prepare(self, folder: Path) -> None:
        self._publish(folder, Faulty(), 1, None)

    def act(self, folder: Path, calls: SystemCalls, done: list[Any]) -> None:
        self._publish(folder, calls, 2, VersionId(1, 1))
        done.append(2)

    def check(self, folder: Path, result: Result) -> None:
        first, *more = inventory(folder, verify=True)
        assert first.state == "complete"
        assert [one.state for one in more] in ([], ["unfinished"], ["complete"])
        if result.done:
            assert more[0].state == "complete"

    def _publish(self, folder: Path, calls: SystemCalls, step: int, base: VersionId | None) -> None:
        version = VersionId(step, 1)
        own = folder / version.name
        before = None if base is None else VersionBits(base, _tensors(base.step))
        with PartWriter(own, 0, before, calls=calls) as writer:
            for name, bits in _tensors(step).items():
                writer.add(name, "bfloat16", (32,), bits)
            publish(own, [writer.finish()], version, base, calls=calls)


class PruneWeights(PublishWeights):
    gives_up = True

    def prepare(self, folder: Path) -> None:
        self._publish(folder, Faulty(), 1, None)
        self._publish(folder, Faulty(), 2, VersionId(1, 1))
        self._publish(folder, Faulty(), 3, None)

    def act(self, folder: Path, calls: SystemCalls, done: list[Any]) -> None:
        done.append([one.step for one in prune(folder, 1, calls=calls)])

    def check(self, folder: Path, result: Result) -> None:
        found = inventory(folder, verify=True)
        assert {one.state for one in found} == {"complete"}
        assert [one.step for one in found] in ([1, 2, 3], [1, 3], [3])
        if result.done:
            assert len(found) == 1


class WriteSamples(Protocol):
    """Writes samples as a task, which tries again after a failure. The record follows the file."""

    def act(self, folder: Path, calls: SystemCalls, done: list[Any]) -> None:
        writer = SampleWriter(folder / "samples", calls=calls)
        log = LogWriter(folder / "results", durable=True, calls=calls)
        groups = [small_group(1), small_group(2)]
        try:
            stored = writer.write(groups)
        except EnvironmentFailure:
            stored = writer.write(groups)
        log.append(RESULT_LOG.to_json(GroupsFinished(groups=stored)))
        done.append(2)

    def check(self, folder: Path, result: Result) -> None:
        records = [RESULT_LOG.from_json(values) for values in LogReader(folder / "results").read()]
        stored = [one for e in records if isinstance(e, GroupsFinished) for one in e.groups]
        assert [read_group(folder / "samples", one).item for one in stored] in ([], [1, 2])
        if result.done:
            assert len(stored) == 2


class ReadSamples(Protocol):
    """Reads samples. The result is an error or the right samples, and never other samples."""

    errors = (EnvironmentFailure, SampleFileError)
    gives_up = True

    def prepare(self, folder: Path) -> None:
        self._stored = SampleWriter(folder, calls=Faulty()).write([small_group(1), small_group(2)])

    def act(self, folder: Path, calls: SystemCalls, done: list[Any]) -> None:
        done += [read_group(folder, one, calls=calls).item for one in self._stored]

    def check(self, folder: Path, result: Result) -> None:
        assert result.done == [1, 2][: len(result.done)]


PROTOCOLS: dict[str, Protocol] = {
    kind.__name__: kind()
    for kind in (
        *(ExclusiveCreate, ExclusiveCreateTaken, Replace, Read, Remove),
        *(MakeDirectory, Sweep, Names, AppendHistory, Log, FollowLog, Beat, ReadCounter),
        *(WriteManifest, PublishWeights, PruneWeights),
        *(WriteSamples, ReadSamples),
    )
}


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def attempt(protocol: Protocol, folder: Path, calls: Faulty) -> Result:
    """Run the protocol once. Only typed errors may be raised."""
    folder.mkdir()
    protocol.prepare(folder)
    result = Result()
    try:
        protocol.act(folder, calls, result.done)
    except protocol.errors as error:
        result.error = error
    protocol.check(folder, result)
    return result


def faults(names: list[str]) -> Iterator[tuple[int, int, bool]]:
    """Yield the operation, the error, and whether the operation took effect, for all operations of
    a protocol.
    """
    for number, name in enumerate(names):
        yield from ((number, error, False) for error in ERRORS)
        yield from ((number, error, True) for error in UNCLEAR)
        if name in REPEATED:
            yield number, REPEATED[name], True


@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocols_survive_one_failed_operation(name: str, tmp_path: Path) -> None:
    sound = Faulty()
    assert attempt(PROTOCOLS[name], tmp_path / "sound", sound).error is None
    retried = 0
    for number, (at, error, done) in enumerate(faults(sound.names)):
        calls = Faulty(at, error, done=done)
        try:
            result = attempt(PROTOCOLS[name], tmp_path / str(number), calls)
        except Exception as problem:
            what = f"{sound.names[at]} ({at}) with {errno.errorcode[error]}, done={done}"
            raise AssertionError(f"{name}: {what}: {problem!r}") from problem
        retried += result.error is None
    assert retried or PROTOCOLS[name].gives_up, "no fault was survived"


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: errno.errorcode[error])
@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocols_survive_a_permanently_failing_directory(
    name: str, error: int, tmp_path: Path
) -> None:
    sound = Faulty()
    attempt(PROTOCOLS[name], tmp_path / "sound", sound)
    for at in range(sound.count):
        calls = Faulty(at, error, times=10**9)
        attempt(PROTOCOLS[name], tmp_path / str(at), calls)
        assert calls.clock.now_s < 120, "bounded retries"


READERS: dict[str, Callable[[Path, SystemCalls], Any]] = {
    "history": lambda folder, calls: History(folder, calls=calls).read(),
    "counter": lambda folder, calls: read_counter(folder / "lease", calls=calls),
    "listing": lambda folder, calls: atomic.list_names(folder, calls=calls),
    "log": lambda folder, calls: LogReader(folder / "log", calls=calls).read(),
    "names": lambda folder, calls: NameStore(folder, calls=calls).get("a"),
}


@pytest.mark.parametrize("name", ["exclusive", "replace", "log", "history", "lease"])
def test_deleted_root_is_an_error_for_every_writer(name: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    writer = LogWriter(root / "log")
    history = History(root)
    act: dict[str, Callable[[], Any]] = {
        "exclusive": lambda: atomic.exclusive_create(root / "a", NEW),
        "replace": lambda: atomic.replace(root / "a", NEW),
        "log": lambda: writer.append({}),
        "history": lambda: begin(history, {}),
        "lease": Lease(root / "lease").beat,
    }
    (root / "log").unlink()
    root.rmdir()
    with pytest.raises(EnvironmentFailure, match=str(root)):
        act[name]()


def test_deleted_root_keeps_records_already_read(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    history = History(root)
    writer = begin(history, {})
    root.rename(tmp_path / "elsewhere")
    for look in (history.read, writer.check, lambda: writer.append(Kind.FINISHED, {})):
        with pytest.raises(EnvironmentFailure, match="No such file"):
            look()
    (tmp_path / "elsewhere").rename(root)
    writer.append(Kind.FINISHED, {})
    assert fold(history.read()).end is not None


def test_deleted_root_declares_no_holder_dead(tmp_path: Path) -> None:
    root, clock = tmp_path / "root", Clock()
    root.mkdir()
    lease = Lease(root / "lease")
    watching = LeaseObserver(root / "lease", 60.0, clock)
    lease.beat()
    assert watching.observe().alive
    root.rename(tmp_path / "elsewhere")
    for _ in range(100):
        clock.advance(10)
        assert watching.observe().alive
    (tmp_path / "elsewhere").rename(root)
    for _ in range(4):
        assert watching.observe().alive
        clock.advance(15)
    clock.advance(15)
    assert not watching.observe().alive, "silence on a directory that answers"


@pytest.mark.parametrize("hang_s", [1.0, 300.0])
def test_directory_that_hangs_for_minutes_declares_no_holder_dead(
    tmp_path: Path, hang_s: float
) -> None:
    """Every operation of holder and observer takes ``hang_s``. The holder renews its lease as often
    as it can.
    """
    clock = Clock()
    slow = Faulty(hang_s=hang_s, clock=clock)
    lease = Lease(tmp_path / "lease", calls=slow)
    watchers = [LeaseObserver(tmp_path / "lease", 60.0, clock, calls=slow) for _ in range(10)]
    for _ in range(20):
        lease.beat()
        for _ in range(3):
            assert all(watching.observe().alive for watching in watchers)


def test_one_long_hang_declares_no_holder_dead(tmp_path: Path) -> None:
    """The directory hangs for ten minutes, for holder and observers, during a read of the lease."""
    clock = Clock()
    calls = Faulty(clock=clock)
    lease = Lease(tmp_path / "lease", calls=calls)
    watchers = [LeaseObserver(tmp_path / "lease", 60.0, clock, calls=calls) for _ in range(10)]
    lease.beat()
    for watching in watchers:
        watching.observe()
    clock.advance(10)
    calls.hang_s = 600
    assert all(watching.observe().alive for watching in watchers)
    calls.hang_s = 0
    assert all(watching.observe().alive for watching in watchers)
    lease.beat()
    assert all(watching.observe().age_s == 0 for watching in watchers)


@pytest.mark.parametrize("name", READERS)
def test_hang_delays_readers_without_changing_results(name: str, tmp_path: Path) -> None:
    begin(History(tmp_path), {})
    Lease(tmp_path / "lease").beat()
    LogWriter(tmp_path / "log").append({"n": 0})
    NameStore(tmp_path).add("a", "1")
    clock = Clock()
    expected = READERS[name](tmp_path, REAL)
    assert READERS[name](tmp_path, Faulty(hang_s=180, clock=clock)) == expected
    assert clock.now_s >= 180


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: errno.errorcode[error])
def test_readers_raise_typed_errors(name: str, error: int, tmp_path: Path) -> None:
    begin(History(tmp_path), {})
    Lease(tmp_path / "lease").beat()
    LogWriter(tmp_path / "log").append({"n": 0})
    NameStore(tmp_path).add("a", "1")
    sound = Faulty()
    expected = READERS[name](tmp_path, sound)
    for at in range(sound.count):
        for times in (1, 10**9):
            with suppress(SlurmrlError):
                found = READERS[name](tmp_path, Faulty(at, error, times=times))
                assert found == expected or (name, error, found) == ("log", errno.ESTALE, [])
