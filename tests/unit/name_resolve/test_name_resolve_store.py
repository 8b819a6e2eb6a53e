"""The name store: its operations, several stores on one directory, and its files."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmrl.errors import (
    CorruptFileError,
    EnvironmentFailure,
    InvalidNameError,
    NameExistsError,
    NameNotFoundError,
)
from slurmrl.name_resolve import store as module
from slurmrl.name_resolve.store import NameStore, decode, encode, normalize


@pytest.fixture
def store(tmp_path: Path) -> NameStore:
    return NameStore(tmp_path)


def test_added_value_is_read(store: NameStore) -> None:
    store.add("a", "1")
    assert store.get("a") == "1"
    with pytest.raises(NameNotFoundError, match="'b'"):
        store.get("b")


def test_add_is_rejected_for_an_existing_key(store: NameStore) -> None:
    store.add("a", "1")
    with pytest.raises(NameExistsError, match="'a'"):
        store.add("a", "1")
    store.add("a", "2", replace=True)
    store.add("b", "3", replace=True)
    assert (store.get("a"), store.get("b")) == ("2", "3")


def test_subtree_lists_its_keys_and_values(store: NameStore) -> None:
    for key in ("run/b", "run/a/x", "run", "runner", "run/a", "other"):
        store.add(key, f"value of {key}")
    keys = ["run", "run/a", "run/a/x", "run/b"]
    assert store.find_subtree("run") == store.find_subtree("./run//") == keys
    assert store.get_subtree("run") == [f"value of {key}" for key in keys]
    assert store.find_subtree("nothing") == store.get_subtree("nothing") == []
    assert store.find_subtree("") == store.find_subtree("/") == sorted([*keys, "runner", "other"])


def test_subentries_get_unique_names(store: NameStore) -> None:
    keys = {store.add_subentry("root/", number) for number in range(50)}
    assert len(keys) == 50
    assert sorted(map(int, store.get_subtree("root"))) == list(range(50))
    store.add("rooted", "1")
    store.clear_subtree("root")
    store.clear_subtree("root")
    assert store.find_subtree("") == ["rooted"]
    store.add_subentry("root", "1")
    store.reset()
    assert store.find_subtree("") == ["rooted"]


def test_wait_returns_value_that_another_process_adds(store: NameStore, tmp_path: Path) -> None:
    store.add("a", "1")
    assert store.wait("a/", timeout_s=0) == "1"
    adds = threading.Timer(0.1, lambda: NameStore(tmp_path).add("b", "2"))
    adds.start()
    assert store.wait("b", timeout_s=60) == "2"
    adds.join()
    for timeout_s in (-1.0, 0.0, 0.05):
        with pytest.raises(NameNotFoundError, match="no key 'c' within"):
            store.wait("c", timeout_s=timeout_s)
    with pytest.raises(EnvironmentFailure, match="gone"):
        NameStore(tmp_path / "gone").wait("a", timeout_s=0.05)


def test_callback_runs_once_after_the_last_name_is_deleted(store: NameStore) -> None:
    calls: list[int] = []
    for key in ("a", "b", "c"):
        store.add(key, "")
    watch = store.watch_names(["a/", "b"], lambda: calls.append(1))
    store.delete("a")
    watch.join(0.2)
    assert watch.is_alive()
    assert calls == []
    store.delete("b")
    watch.join(60)
    store.watch_names("never", lambda: calls.append(2), timeout_s=0.05).join(60)
    assert calls == [1, 2]


def test_deleted_name_can_be_added_again(store: NameStore) -> None:
    store.add("a", "1")
    store.delete("a")
    with pytest.raises(NameNotFoundError, match="'a'"):
        store.delete("a")
    store.add("a", "2")
    assert store.get("a") == "2"


def test_reset_deletes_only_keys_marked_for_it(store: NameStore, tmp_path: Path) -> None:
    for key in ("gone", "given up", "replaced by others"):
        store.add(key, "1", delete_on_exit=True)
    store.add("stays", "1")
    store.add("given up", "2", replace=True)
    NameStore(tmp_path).add("replaced by others", "1", replace=True)
    store.reset()
    assert store.find_subtree("") == ["given up", "replaced by others", "stays"]


@pytest.mark.parametrize(
    ("name", "same"),
    [("a/", "a"), ("a//b", "a/b"), ("./a", "a"), ("a/./b/", "a/b"), ("/a", "a"), ("//a", "a")],
)
def test_keys_are_normalized_to_one_form(store: NameStore, name: str, same: str) -> None:
    store.add(name, "1")
    assert store.get(same) == store.get(name) == "1"
    assert store.find_subtree("") == [same]
    with pytest.raises(NameExistsError):
        store.add(same, "2")


@pytest.mark.parametrize(
    "name", ["", "/", ".", "..", "../a", "a/..", "a/../../b", "a\nb", "a\x00", "\ud800", None, 3]
)
def test_hostile_names_are_rejected(store: NameStore, name: str) -> None:
    for use in (lambda: store.add(name, "1"), lambda: store.get(name)):
        with pytest.raises(InvalidNameError):
            use()


@pytest.mark.parametrize(
    "name", ["a/" * 100 + "key", "测试/键", " !@#$%^&*()_+-=[]{}|;:'\",.<>?`~", ".a"]
)
def test_unusual_names_are_accepted(store: NameStore, name: str) -> None:
    store.add(name, "x" * 10_000)
    assert store.get(name) == "x" * 10_000
    assert store.find_subtree("") == [name]


def test_names_beyond_limits_give_clear_errors(store: NameStore) -> None:
    store.add("a" * 255, "1")
    with pytest.raises(InvalidNameError, match="256 bytes encoded, at most 255"):
        store.add("a" * 256, "1")
    with pytest.raises(InvalidNameError, match="at most 255"):
        store.get("x" * 10_000)
    store.add("a", "x" * 2**20)
    with pytest.raises(InvalidNameError, match="1048577 bytes"):
        store.add("b", "x" * (2**20 + 1))
    with pytest.raises(InvalidNameError, match="surrogates"):
        store.add("b", "\ud800")


@settings(deadline=None)
@given(st.text())
def test_key_encoding_is_one_to_one(name: str) -> None:
    try:
        key = normalize(name)
    except InvalidNameError:
        return
    assert decode(encode(key)) == key == normalize(key)
    assert "/" not in encode(key)
    assert not encode(key).startswith(".")


def test_stores_in_one_directory_are_independent(tmp_path: Path) -> None:
    ours, theirs = NameStore(tmp_path), NameStore(tmp_path)
    ours.add("a", "1")
    assert theirs.get("a") == "1"
    theirs.add("a", "2", replace=True)
    assert ours.get("a") == "2"


def test_files_are_flat_and_private(tmp_path: Path) -> None:
    store = NameStore(tmp_path)
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
        b'{"value": 1, "nonce": "x"}',
        b"\xff\x00",
        b"[" * 10**5,
    ],
)
def test_hostile_content_is_reported(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(CorruptFileError, match=r"/a is not an entry"):
        NameStore(tmp_path).get("a")


def test_files_of_other_users_are_not_keys(tmp_path: Path) -> None:
    for name in (b".tmp.left", b"..x", b"%zz", b"\xff", b"new\nline", b".nfs0001"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).touch()
    assert NameStore(tmp_path).find_subtree("") == []


def test_missing_store_directory_is_an_error(tmp_path: Path) -> None:
    store = NameStore(tmp_path / "gone")
    assert store.find_subtree("a") == store.get_subtree("a") == []
    with pytest.raises(NameNotFoundError):
        store.get("a")
    with pytest.raises(EnvironmentFailure, match="gone"):
        store.add("a", "1")
    assert not (tmp_path / "gone").exists()


def test_subtree_listing_decodes_only_its_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = NameStore(tmp_path)
    for key in ("a/b", "a", "a b/c", "ab", "b/a", ".a/b"):
        store.add(key, "1")
    decoded: list[str] = []

    def counted(name: str) -> str | None:
        decoded.append(name)
        return decode(name)

    monkeypatch.setattr(module, "decode", counted)
    assert store.find_subtree("a") == ["a", "a/b"]
    assert sorted(decoded) == ["a", "a%20b+c", "a+b", "ab"]
    assert store.find_subtree(".a") == [".a/b"]
