from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest

from slurmrl.backoff import UNCLEAR_PAUSES_S
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import TEMPORARY_PREFIX, SystemCalls
from tests.support.faulty import Faulty


class Scripted(SystemCalls):
    """File operations that fail at chosen calls, before or after their effect."""

    def __init__(self, method: str, error: int, *, times: int = 1, done: bool = False) -> None:
        self.method, self.error, self.times, self.done = method, error, times, done
        self.slept: list[float] = []

    def __getattribute__(self, name: str) -> object:
        real = super().__getattribute__(name)
        if name != super().__getattribute__("method"):
            return real

        def faulty(*args: object) -> object:
            if self.times <= 0:
                return real(*args)
            self.times -= 1
            if self.done:
                real(*args)
            raise OSError(self.error, os.strerror(self.error))

        return faulty

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def odd_umask() -> Iterator[None]:
    before = os.umask(0o277)
    yield
    os.umask(before)


def temporaries(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(TEMPORARY_PREFIX)]


def test_exclusive_create_has_one_winner_and_leaves_no_temporaries(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    assert atomic.exclusive_create(path, b"first")
    assert not atomic.exclusive_create(path, b"second")
    assert atomic.read(path) == b"first"
    assert os.listdir(tmp_path) == ["slot"]


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EEXIST, errno.ETIMEDOUT])
def test_hard_link_with_a_lost_reply_still_wins(tmp_path: Path, error: int) -> None:
    calls = Scripted("link", error, done=True)
    assert atomic.exclusive_create(tmp_path / "slot", b"ours", calls=calls)
    assert atomic.read(tmp_path / "slot") == b"ours"


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.ENOENT])
def test_failed_hard_link_is_retried(tmp_path: Path, error: int) -> None:
    calls = Scripted("link", error, times=3)
    assert atomic.exclusive_create(tmp_path / "slot", b"ours", calls=calls)
    assert len(calls.slept) == 3


def test_exclusive_create_is_lost_if_an_error_leaves_other_content(
    tmp_path: Path,
) -> None:
    (tmp_path / "slot").write_bytes(b"theirs")
    calls = Scripted("link", errno.EIO)
    assert not atomic.exclusive_create(tmp_path / "slot", b"ours", calls=calls)


def test_uncertain_hard_link_is_retried_a_limited_number_of_times(tmp_path: Path) -> None:
    calls = Scripted("link", errno.EIO, times=1000)
    with pytest.raises(EnvironmentFailure, match=r"create .*slot.*EIO"):
        atomic.exclusive_create(tmp_path / "slot", b"ours", calls=calls)
    assert len(calls.slept) == len(UNCLEAR_PAUSES_S)
    assert temporaries(tmp_path) == []


@pytest.mark.parametrize("method", ["open", "pwrite", "fsync", "close", "link", "fsync_directory"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_definite_errors_are_raised_at_once(tmp_path: Path, method: str, error: int) -> None:
    calls = Scripted(method, error, times=1000)
    with pytest.raises(EnvironmentFailure, match=str(tmp_path)):
        atomic.exclusive_create(tmp_path / "slot", b"ours", calls=calls)
    assert calls.slept == []


def test_exclusive_create_fails_in_a_missing_directory(tmp_path: Path) -> None:
    calls = Scripted("none", 0)
    with pytest.raises(EnvironmentFailure, match="No such file"):
        atomic.exclusive_create(tmp_path / "gone" / "slot", b"x", calls=calls)
    assert calls.slept == []


def test_replace_writes_new_content_and_removes_temporaries(tmp_path: Path) -> None:
    atomic.replace(tmp_path / "a", b"1")
    atomic.replace(tmp_path / "a", b"2", durable=False)
    assert atomic.read(tmp_path / "a") == b"2"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("done", [True, False])
def test_replace_survives_an_uncertain_rename(tmp_path: Path, done: bool) -> None:
    calls = Scripted("rename", errno.EIO, times=1 if done else 2, done=done)
    atomic.replace(tmp_path / "a", b"1", calls=calls)
    assert atomic.read(tmp_path / "a") == b"1"
    assert len(calls.slept) == (0 if done else 2)


def test_replace_keeps_the_old_content_on_a_full_disk(tmp_path: Path) -> None:
    atomic.replace(tmp_path / "a", b"old")
    with pytest.raises(EnvironmentFailure, match="No space left"):
        atomic.replace(tmp_path / "a", b"new", calls=Scripted("pwrite", errno.ENOSPC))
    assert atomic.read(tmp_path / "a") == b"old"
    assert temporaries(tmp_path) == []


class Sequence(SystemCalls):
    """File operations that record each operation with its kind of file."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def fsync(self, descriptor: int) -> None:
        self.done.append("fsync file")

    def fsync_directory(self, directory: Path) -> None:
        self.done.append("fsync directory")

    def link(self, source: Path, target: Path) -> None:
        self.done.append("link")
        super().link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        self.done.append("rename")
        super().rename(source, target)


def test_content_is_on_disk_before_its_name(tmp_path: Path) -> None:
    calls = Sequence()
    atomic.exclusive_create(tmp_path / "a", b"1", calls=calls)
    atomic.replace(tmp_path / "a", b"1", calls=calls)
    names = ["link", "rename"]
    assert calls.done == [
        step for name in names for step in ("fsync file", name, "fsync directory")
    ]


def test_read_retries_only_stale_handles(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 40_000)
    calls = Scripted("read", errno.ESTALE, times=2)
    assert atomic.read(tmp_path / "a", calls=calls) == b"x" * 40_000
    assert len(calls.slept) == 2
    with pytest.raises(EnvironmentFailure, match="ESTALE"):
        atomic.read(tmp_path / "a", calls=Scripted("open", errno.ESTALE, times=1000))
    with pytest.raises(EnvironmentFailure, match="EIO"):
        atomic.read(tmp_path / "a", calls=Scripted("read", errno.EIO))
    with pytest.raises(FileNotFoundError):
        atomic.read(tmp_path / "b")


def test_read_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "a").symlink_to(tmp_path / "secret")
    with pytest.raises(CorruptFileError, match="a is a symbolic link"):
        atomic.read(tmp_path / "a")


def test_remove_deletes_a_file_and_accepts_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert atomic.remove(tmp_path / "a")
    assert not atomic.remove(tmp_path / "a")


def test_remove_exactly_keeps_a_file_with_other_content(tmp_path: Path) -> None:
    path = tmp_path / "a"
    atomic.replace(path, b"theirs")
    assert not atomic.remove_exactly(path, b"ours")
    assert atomic.remove_exactly(path, b"theirs")
    assert not atomic.remove_exactly(path, b"theirs")
    assert os.listdir(tmp_path) == []


class ReplacedInBetween(SystemCalls):
    """File operations in which another writer replaces the file between the read and the rename."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rename(self, source: Path, target: Path) -> None:
        if source == self.path:
            atomic.replace(self.path, b"theirs")
        super().rename(source, target)


def test_remove_exactly_restores_a_concurrently_replaced_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    atomic.replace(path, b"ours")
    assert not atomic.remove_exactly(path, b"ours", calls=ReplacedInBetween(path))
    assert atomic.read(path) == b"theirs"
    assert temporaries(tmp_path) == []


def test_temporaries_are_skipped_by_listing_and_removed_by_sweep(tmp_path: Path) -> None:
    for name in ("b", "a", f"{TEMPORARY_PREFIX}1", f"{TEMPORARY_PREFIX}2"):
        (tmp_path / name).touch()
    assert atomic.list_names(tmp_path) == ["a", "b"]
    assert atomic.sweep_temporaries(tmp_path) == 2
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    with pytest.raises(FileNotFoundError):
        atomic.list_names(tmp_path / "gone")


class SweptBefore(SystemCalls):
    """File operations in which another process empties the directory before a link."""

    swept = 0

    def _sweep(self, directory: Path) -> None:
        if not self.swept:
            self.swept = atomic.sweep_temporaries(directory)

    def link(self, source: Path, target: Path) -> None:
        self._sweep(target.parent)
        super().link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        self._sweep(target.parent)
        super().rename(source, target)

    def sleep(self, seconds: float) -> None:
        pass


def test_create_and_replace_survive_a_removal_of_their_temporary_file(tmp_path: Path) -> None:
    creating, replacing = SweptBefore(), SweptBefore()
    assert atomic.exclusive_create(tmp_path / "a", b"1", calls=creating)
    atomic.replace(tmp_path / "a", b"2", calls=replacing)
    assert (creating.swept, replacing.swept) == (1, 1)
    assert atomic.read(tmp_path / "a") == b"2"


@pytest.mark.usefixtures("odd_umask")
def test_files_are_private_with_any_umask(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    atomic.make_private_directory(directory)
    atomic.exclusive_create(directory / "created", b"1")
    atomic.replace(directory / "replaced", b"1")
    for path in (directory, directory.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in directory.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_make_private_directory_does_not_change_an_existing_directory(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    atomic.make_private_directory(shared / "mine")
    atomic.make_private_directory(shared / "mine")
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755
    (shared / "file").touch()
    with pytest.raises(EnvironmentFailure, match="not a directory"):
        atomic.make_private_directory(shared / "file")


def test_link_probe_reports_file_systems_without_links(tmp_path: Path) -> None:
    atomic.probe_link(tmp_path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(EnvironmentFailure, match="hard link"):
        atomic.probe_link(tmp_path, calls=Scripted("link", errno.EPERM))
    assert os.listdir(tmp_path) == []


def test_sync_file_calls_fsync(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    calls = Sequence()
    atomic.sync_file(tmp_path / "a", calls=calls)
    assert calls.done == ["fsync file"]


class Counting(SystemCalls):
    """Counts the operations."""

    def __init__(self) -> None:
        self.count = 0

    def __getattribute__(self, name: str) -> object:
        if hasattr(SystemCalls, name) and not name.startswith("_"):
            self.count += 1
        return super().__getattribute__(name)


def test_directory_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    """The proc file system, like an automounter, says that a name does not exist."""
    with pytest.raises(EnvironmentFailure, match=r"cannot make directory /proc/nothing-here: .*"):
        atomic.make_private_directory(Path("/proc/nothing-here/below"))


def test_reading_a_file_takes_four_operations(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    calls = Counting()
    atomic.read(tmp_path / "a", calls=calls)
    assert calls.count == 4


def test_file_written_in_parts_is_old_or_new_after_any_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    sound = Faulty()
    atomic.replace_by_parts(path, (b"old",), calls=sound)
    for at, done in product(range(sound.count), (False, True)):
        path.write_bytes(b"old")
        with suppress(EnvironmentFailure):
            atomic.replace_by_parts(path, (b"n", b"ew"), calls=Faulty(at, errno.EIO, done=done))
        assert path.read_bytes() in (b"old", b"new")
        atomic.sweep_temporaries(tmp_path)
    path.write_bytes(b"old")

    def parts() -> Iterator[bytes]:
        yield b"n"
        raise LookupError("no more")

    with pytest.raises(LookupError):
        atomic.replace_by_parts(path, parts())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600
