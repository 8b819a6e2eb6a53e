"""Names in files: several stores on one directory, and its contents."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmrl.errors import (
    CorruptFileError,
    EnvironmentFailure,
    NameExistsError,
    NameNotFoundError,
)
from slurmrl.fsio.calls import SystemCalls
from slurmrl.name_resolve import base, file
from slurmrl.name_resolve.file import FileNameStore
from slurmrl.run.lease import Lease, LeaseBoard


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
        b'{"value": "x", "nonce": "../x"}',
        b'{"value": "x", "nonce": "x", "owner": "../../x"}',
        b'{"value": "x", "nonce": "x", "owner": 1}',
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


def test_listing_a_subtree_decodes_its_names_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileNameStore(tmp_path)
    for key in ("a/b", "a", "a b/c", "ab", "b/a", ".a/b"):
        store.add(key, "1")
    decoded: list[str] = []

    def decode(name: str) -> str | None:
        decoded.append(name)
        return base.decode(name)

    monkeypatch.setattr(file, "decode", decode)
    assert store.find_subtree("a") == ["a", "a/b"]
    assert sorted(decoded) == ["a", "a%20b+c", "a+b", "ab"]
    assert store.find_subtree(".a") == [".a/b"]


def test_an_heir_that_dies_before_it_takes_over_has_an_heir(tmp_path: Path) -> None:
    dead = {"a.0.0"}

    def alive(owner: str) -> bool:
        return owner not in dead

    class Killed(BaseException):
        pass

    class Dying(SystemCalls):
        def rename(self, source: Path, target: Path) -> None:
            raise Killed

    FileNameStore(tmp_path, owner="a.0.0").add("key", "1")
    with pytest.raises(Killed):
        FileNameStore(tmp_path, owner="a.0.1", alive=alive, calls=Dying()).add("key", "2")
    third = FileNameStore(tmp_path, owner="a.0.2", alive=alive)
    with pytest.raises(NameExistsError):
        third.add("key", "3")
    dead.add("a.0.1")
    third.add("key", "3")
    assert FileNameStore(tmp_path).entries() == {"key": third._get("key")}
    assert third.get("key") == "3"


def test_owners_are_judged_by_their_leases(tmp_path: Path) -> None:
    now = 0.0
    for folder in ("names", "leases"):
        (tmp_path / folder).mkdir()
    lease = Lease(tmp_path / "leases" / "a.0.0")
    lease.beat()
    board = LeaseBoard(tmp_path / "leases", ttl_s=60.0, look_s=5.0, clock=lambda: now)
    FileNameStore(tmp_path / "names", owner="a.0.0").add("key", "1")
    store = FileNameStore(tmp_path / "names", alive=board.alive)
    for _ in range(100):
        lease.beat()
        now += 10.0
        assert store.get("key") == "1"
    looks = 0
    while store.find_subtree("") == ["key"]:
        now += 10.0
        looks += 1
    assert looks == 6


class PausedReplace(SystemCalls):
    """Stops before the first rename, to let another process continue, and does it afterwards."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.meanwhile: Callable[[], None] | None = meanwhile

    def rename(self, source: Path, target: Path) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        super().rename(source, target)


def test_an_heir_that_was_paused_takes_nothing_back(tmp_path: Path) -> None:
    dead = {"first", "second"}

    def alive(owner: str) -> bool:
        return owner not in dead

    def store(owner: str, calls: SystemCalls | None = None) -> FileNameStore:
        return FileNameStore(tmp_path, owner=owner, alive=alive, calls=calls or SystemCalls())

    store("first").add("a", "1")
    third = store("third")
    paused = PausedReplace(lambda: third.add("a", "3"))
    store("second", paused).add("a", "2")
    assert paused.meanwhile is None, "the second heir was paused before its replace"
    assert third.get("a") == "3", "acknowledged, and not overwritten when the second went on"
    assert store("fourth").get("a") == "3"
