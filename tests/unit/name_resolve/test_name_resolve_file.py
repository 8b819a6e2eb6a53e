"""What is special to names in files: several stores on one directory, and what lies in it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from slurmrl.errors import CorruptFileError, EnvironmentFailure, NameNotFoundError
from slurmrl.fsio.calls import SystemCalls
from slurmrl.name_resolve.file import FileNameStore


def test_stores_share_a_directory_and_nothing_else(tmp_path: Path) -> None:
    ours, theirs = FileNameStore(tmp_path), FileNameStore(tmp_path)
    ours.add("a", "1")
    ours.add("b", "1")
    theirs.add("c", "1")
    assert theirs.get("a") == "1"
    theirs.add("b", "1", replace=True)
    ours.reset()
    assert ours.find_subtree("") == ["b", "c"]


def test_files_are_flat_and_private(tmp_path: Path) -> None:
    store = FileNameStore(tmp_path)
    store.add("a/b", "1")
    store.add("a", "1", replace=True)
    store.add(".tmp.x", "1")
    assert sorted(os.listdir(tmp_path)) == ["%2Etmp.x", "a", "a+b"]
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert store.find_subtree("") == [".tmp.x", "a", "a/b"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b'{"value": "x"}',
        b'{"value": 1, "nonce": "x"}',
        b"\xff\x00",
        b"[" * 10**5,
    ],
)
def test_hostile_content_is_reported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"/a is not an entry"):
        FileNameStore(tmp_path).get("a")


def test_files_of_others_are_no_keys(tmp_path: Path) -> None:
    for name in (b".tmp.left", b"..x", b"%zz", b"\xff", b"new\nline", b".nfs0001"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).touch()
    assert FileNameStore(tmp_path).find_subtree("") == []


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    store = FileNameStore(tmp_path / "gone")
    assert store.find_subtree("a") == store.get_subtree("a") == []
    with pytest.raises(NameNotFoundError):
        store.get("a")
    with pytest.raises(EnvironmentFailure, match="gone"):
        store.add("a", "1")
    assert not (tmp_path / "gone").exists()


class Failing(SystemCalls):
    fails = False

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        if self.fails:
            raise OSError(errno.EIO, "broken")
        return super().open(path, flags, mode)


def test_a_watch_outlives_a_directory_that_does_not_answer(tmp_path: Path) -> None:
    calls = Failing()
    store = FileNameStore(tmp_path, calls=calls)
    store.add("a", "1")
    called: list[int] = []
    watch = store.watch_names("a", lambda: called.append(1), poll_s=0.01)
    calls.fails = True
    assert not watch.join(0.2)
    assert called == []
    calls.fails = False
    store.delete("a")
    assert watch.join(60)
    assert called == [1]
