from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from slurmrl.errors import EnvironmentFailure, OwnershipError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import SystemCalls

OURS, THEIRS = os.geteuid(), os.geteuid() + 1


class Owned(SystemCalls):
    """File operations that show some paths as another user's, or fail."""

    def __init__(self, theirs: tuple[Path, ...] = (), error: int = 0) -> None:
        self.theirs = theirs
        self.error = error

    def stat(self, path: Path) -> os.stat_result:
        return self._changed(path, super().stat(path))

    def lstat(self, path: Path) -> os.stat_result:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return self._changed(path, super().lstat(path))

    def _changed(self, path: Path, found: os.stat_result) -> os.stat_result:
        uid = THEIRS if path in self.theirs else found.st_uid
        return os.stat_result((*found[:4], uid, *found[5:10]))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "root" / "run"
    path.mkdir(parents=True, mode=0o700)
    path.parent.chmod(0o755)
    path.chmod(0o700)
    return path


def test_private_directory_gives_no_warning(run: Path) -> None:
    assert atomic.check_ownership(run) == []
    run.chmod(0o2700)
    assert atomic.check_ownership(run) == []


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o770, 0o777, 0o500, 0o000])
def test_directory_with_another_mode_is_rejected(run: Path, mode: int) -> None:
    run.chmod(mode)
    with pytest.raises(OwnershipError, match=f"has mode {mode:04o}.*chmod 700"):
        atomic.check_ownership(run)


def test_directory_of_another_user_is_rejected(run: Path) -> None:
    with pytest.raises(OwnershipError, match=f"belongs to user {THEIRS}, not to you"):
        atomic.check_ownership(run, calls=Owned((run,)))


def test_link_or_file_in_place_of_the_directory_is_rejected(run: Path) -> None:
    link, file = run.parent / "link", run.parent / "file"
    link.symlink_to(run)
    file.touch()
    with pytest.raises(OwnershipError, match="a symbolic link"):
        atomic.check_ownership(link)
    with pytest.raises(OwnershipError, match="a file"):
        atomic.check_ownership(file)


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o703])
def test_world_writable_ancestor_is_rejected(run: Path, mode: int) -> None:
    run.parent.chmod(mode)
    with pytest.raises(OwnershipError, match=f"root is world-writable .mode {mode:04o}"):
        atomic.check_ownership(run)
    run.parent.chmod(mode | stat.S_ISVTX)
    assert atomic.check_ownership(run) == []


def test_ancestors_of_a_symbolic_link_target_are_checked(run: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(run.parent)
    assert atomic.check_ownership(link / "run") == []
    with pytest.raises(OwnershipError, match="symbolic link of user"):
        atomic.check_ownership(link / "run", calls=Owned((link,)))
    run.parent.chmod(0o777)
    with pytest.raises(OwnershipError, match="is world-writable"):
        atomic.check_ownership(link / "run")


def test_group_writable_or_foreign_ancestors_give_a_warning(run: Path) -> None:
    run.parent.chmod(0o775)
    (warning,) = atomic.check_ownership(run)
    assert f"{run.parent} is writable by group" in warning
    (_, warning) = atomic.check_ownership(run, calls=Owned((run.parent,)))
    assert f"{run.parent} belongs to user {THEIRS}" in warning


def test_unreachable_directory_is_no_ownership_error(run: Path) -> None:
    for path, calls in ((run, Owned(error=errno.EIO)), (run / "gone", SystemCalls())):
        with pytest.raises(EnvironmentFailure) as caught:
            atomic.check_ownership(path, calls=calls)
        assert not isinstance(caught.value, OwnershipError)
