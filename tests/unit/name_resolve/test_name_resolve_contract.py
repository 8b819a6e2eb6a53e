"""What every name store does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmrl.errors import (
    InvalidNameError,
    NameExistsError,
    NameNotFoundError,
    WaitTimeoutError,
)
from slurmrl.name_resolve.base import NameEntry, NameStore, decode, encode, normalise
from slurmrl.name_resolve.file import FileNameStore
from tests.support.memory_names import MemoryNameStore

Connect = Callable[..., NameStore]


@pytest.fixture(params=["file", "memory"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    """Makes stores with the same content."""
    if request.param == "file":
        return partial(FileNameStore, tmp_path)
    entries: dict[str, NameEntry] = {}
    return partial(MemoryNameStore, entries=entries)


@pytest.fixture
def store(connect: Connect) -> NameStore:
    return connect()


def test_add_and_get(store: NameStore) -> None:
    store.add("a", "1")
    assert store.get("a") == "1"
    with pytest.raises(NameNotFoundError, match="'b'"):
        store.get("b")


def test_exclusive_add(store: NameStore) -> None:
    store.add("a", "1")
    with pytest.raises(NameExistsError, match="'a'"):
        store.add("a", "1")
    store.add("a", "2", replace=True)
    store.add("b", "3", replace=True)
    assert (store.get("a"), store.get("b")) == ("2", "3")


def test_delete(store: NameStore) -> None:
    store.add("a", "1")
    store.delete("a")
    with pytest.raises(NameNotFoundError):
        store.get("a")
    with pytest.raises(NameNotFoundError):
        store.delete("a")
    store.add("a", "2")


def test_subtrees(store: NameStore) -> None:
    for key in ("run/b", "run/a/x", "run", "runner", "run/a", "other"):
        store.add(key, f"value of {key}")
    keys = ["run", "run/a", "run/a/x", "run/b"]
    assert store.find_subtree("run") == store.find_subtree("./run//") == keys
    assert store.get_subtree("run") == [f"value of {key}" for key in keys]
    assert store.find_subtree("nothing") == store.get_subtree("nothing") == []
    assert store.find_subtree("") == store.find_subtree("/") == sorted([*keys, "runner", "other"])


def test_subentries_have_names_of_their_own(store: NameStore) -> None:
    keys = [store.add_subentry("run/peers/", value) for value in (1, 2, 1)]
    assert len(set(keys)) == 3
    assert store.find_subtree("run/peers") == sorted(keys)
    assert [store.get(key) for key in keys] == ["1", "2", "1"]
    kept = store.add_subentry("run/peers", 4, delete_on_exit=False)
    store.reset()
    assert store.find_subtree("run") == [kept]


def test_wait_returns_a_value_that_comes_later(connect: Connect) -> None:
    here, there = connect(), connect()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(here.wait, "late", 60, poll_s=0.01)
        there.add("late", "now")
        assert waiting.result(60) == "now"
    assert here.wait("late", 0) == "now"
    with pytest.raises(WaitTimeoutError, match=r"no key 'never' after 0\.01 s"):
        here.wait("never", 0.01)


def test_clear_subtree_deletes_a_root_and_everything_below(connect: Connect) -> None:
    here, there = connect(), connect()
    for store, key in ((here, "run"), (there, "run/a/b"), (here, "runner"), (there, "other")):
        store.add(key, "1")
    here.clear_subtree("run/")
    assert there.find_subtree("") == ["other", "runner"]
    here.clear_subtree("run")
    here.clear_subtree("")
    assert there.find_subtree("") == []
    there.reset()


@pytest.mark.parametrize("gone", ["a", "b/c"])
def test_watch_calls_back_once_when_any_name_is_gone(connect: Connect, gone: str) -> None:
    here, there = connect(), connect()
    calls: list[str] = []
    thread = here.watch_names(["a", "b//c"], partial(calls.append, "gone"), poll_s=0.01)
    there.add("a", "1")
    there.add("b/c", "2")
    here.wait("b/c", 60)
    there.add("a", "replaced", replace=True)
    thread.join(0.05)
    assert thread.is_alive()
    assert calls == []
    there.delete(gone)
    thread.join(60)
    assert calls == ["gone"]


def test_watch_calls_back_for_a_name_that_never_appears(store: NameStore) -> None:
    calls: list[str] = []
    store.add("a", "1")
    store.watch_names(["a", "never"], partial(calls.append, "gone"), wait_s=0.01).join(60)
    assert calls == ["gone"]
    store.watch_names([], partial(calls.append, "none is gone")).join(60)
    assert calls == ["gone"]


@pytest.mark.parametrize(
    ("name", "same"),
    [("a/", "a"), ("a//b", "a/b"), ("./a", "a"), ("a/./b/", "a/b"), ("/a", "a"), ("//a", "a")],
)
def test_names_have_one_form(store: NameStore, name: str, same: str) -> None:
    store.add(name, "1")
    assert store.get(same) == store.get(name) == "1"
    assert store.find_subtree("") == [same]
    with pytest.raises(NameExistsError):
        store.add(same, "2")


@pytest.mark.parametrize(
    "name", ["", "/", ".", "..", "../a", "a/..", "a/../../b", "a\nb", "a\x00", "\ud800", None, 3]
)
def test_hostile_names_are_refused(store: NameStore, name: str) -> None:
    for use in (lambda: store.add(name, "1"), lambda: store.get(name), lambda: store.delete(name)):
        with pytest.raises(InvalidNameError):
            use()


@pytest.mark.parametrize(
    "name", ["a/" * 100 + "key", "测试/键", " !@#$%^&*()_+-=[]{}|;:'\",.<>?`~", ".a"]
)
def test_unusual_names_are_taken(store: NameStore, name: str) -> None:
    store.add(name, "x" * 10_000)
    assert store.get(name) == "x" * 10_000
    assert store.find_subtree("") == [name]


def test_limits_have_clear_errors(store: NameStore) -> None:
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
def test_encoding_is_one_to_one(name: str) -> None:
    try:
        key = normalise(name)
    except InvalidNameError:
        return
    assert decode(encode(key)) == key == normalise(key)
    assert "/" not in encode(key)
    assert not encode(key).startswith(".")


def test_reset_deletes_only_own_keys_marked_for_it(store: NameStore) -> None:
    store.add("gone", "1")
    store.add("stays", "1", delete_on_exit=False)
    store.add("given up", "1")
    store.add("given up", "2", replace=True, delete_on_exit=False)
    store.reset()
    assert store.find_subtree("") == ["given up", "stays"]
    store.add("gone", "2")
    store.reset()
    assert store.find_subtree("") == ["given up", "stays"]


def test_context_manager_resets(store: NameStore) -> None:
    with store:
        store.add("a", "1")
        store.add("b", "1", delete_on_exit=False)
    assert store.find_subtree("") == ["b"]


class Owners:
    """Who is alive, in the eyes of one observer."""

    def __init__(self) -> None:
        self.dead: set[str] = set()

    def alive(self, owner: str) -> bool:
        return owner not in self.dead


def test_keys_die_with_their_owner(connect: Connect) -> None:
    owners = Owners()
    theirs = connect(owner="trainer.0.0")
    ours = connect(alive=owners.alive)
    theirs.add("root/theirs", "1")
    theirs.add("root/stays", "2", delete_on_exit=False)
    ours.add("root/ours", "3")
    assert ours.get_subtree("root") == ["3", "2", "1"]
    owners.dead.add("trainer.0.0")
    assert ours.find_subtree("root") == ["root/ours", "root/stays"]
    assert ours.get_subtree("root") == ["3", "2"]
    with pytest.raises(NameNotFoundError):
        ours.get("root/theirs")
    assert connect().get("root/theirs") == "1"
    assert ours.entries("root")["root/theirs"].owner == "trainer.0.0"
    owners.dead.clear()
    assert ours.get("root/theirs") == "1"


def test_a_dead_owners_key_can_be_added_again(connect: Connect) -> None:
    owners = Owners()
    first = connect(owner="a.0.0")
    first.add("key", "1")
    second = connect(owner="a.0.1", alive=owners.alive)
    with pytest.raises(NameExistsError):
        second.add("key", "2")
    owners.dead.add("a.0.0")
    second.add("key", "2")
    assert connect().get("key") == "2"
    assert connect().find_subtree("") == ["key"]
    with pytest.raises(NameExistsError):
        connect(owner="a.0.2", alive=owners.alive).add("key", "3")
    first.reset()
    assert connect().get("key") == "2"
    owners.dead.add("a.0.1")
    connect(owner="a.0.2", alive=owners.alive).add("key", "3")
    assert connect().get("key") == "3"
