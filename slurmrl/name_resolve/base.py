"""The contract of name stores: one value per key; of concurrent exclusive adds one wins."""

from __future__ import annotations

import json
import math
import posixpath
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from types import TracebackType
from typing import NamedTuple
from urllib.parse import quote, unquote

from slurmrl.backoff import Backoff, retry
from slurmrl.errors import InvalidNameError, NameExistsError, NameNotFoundError, WaitTimeoutError
from slurmrl.fsio import documents
from slurmrl.fsio.shapes import FILE_NAME_BYTES, TEXT, Fields, FieldType

NONCE = FieldType("letters and digits", lambda value: isinstance(value, str) and value.isalnum())
OWNER = FieldType(
    "the name of a lease, or empty",
    lambda value: (
        isinstance(value, str)
        and value.isprintable()
        and "/" not in value
        and not value.startswith(".")
    ),
)
FIELDS: Fields = {"value": TEXT, "nonce": NONCE, "owner": OWNER}


class NameEntry(NamedTuple):
    """One value, encoded as a JSON object with these fields."""

    value: str
    nonce: str
    """Distinguishes this entry from others with the same value."""
    owner: str = ""
    """File name of the lease that the key depends on; empty for a permanent key."""

    def to_json(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @staticmethod
    def from_json(data: bytes, where: object) -> NameEntry:
        """Raises CorruptFileError that names ``where``."""
        subject = f"{where} is not an entry of a name store: it"
        content = documents.parse(data, subject, FIELDS, ("value", "nonce"))
        return NameEntry(content["value"], content["nonce"], content.get("owner") or "")


def nobody_dies(owner: str) -> bool:
    """Treat every owner as alive: for stores that show all keys."""
    return True


class NameStore(ABC):
    """A store of strings by keys, which are paths like ``attempt/trainer/0/1``.

    A key (see `normalise`) can have a value and be a prefix of other keys at once.

    Keys added with ``delete_on_exit`` exist as long as their process: `reset` deletes them. If the
    process dies first, its keys expire with its lease (``owner`` is the file name of that lease). A
    store whose ``alive`` reports an owner as dead hides the owner's keys and lets the next add take
    them over. As a context manager a store calls `reset` on exit.
    """

    def __init__(self, *, owner: str = "", alive: Callable[[str], bool] = nobody_dies) -> None:
        self._owner = owner
        self._alive = alive
        self._added: dict[str, NameEntry] = {}
        """Keys that `reset` deletes."""

    # -- implemented by each kind of store --------------------------------------------------

    @abstractmethod
    def _add(self, key: str, entry: NameEntry, *, replace: bool, durable: bool) -> bool:
        """Store an entry; False if the key exists and ``replace`` is false."""

    @abstractmethod
    def _get(self, key: str) -> NameEntry | None: ...

    @abstractmethod
    def _keys(self, root: str) -> list[str]:
        """Return the keys below ``root`` in any order; others may be among them."""

    @abstractmethod
    def _swap(self, key: str, old: NameEntry, new: NameEntry) -> bool:
        """Replace a dead owner's entry ``old`` by ``new``; False if another process did so first.

        At most one of several processes succeeds, and the key exists all the time.
        """

    @abstractmethod
    def _delete(self, key: str) -> bool: ...

    @abstractmethod
    def _delete_entry(self, key: str, entry: NameEntry) -> None:
        """Delete a key if it still holds this very entry."""

    @abstractmethod
    def refresh(self) -> None:
        """Make entries of other hosts visible that a cache may hide.

        Raises EnvironmentFailure if the store does not answer or is gone.
        """

    # -- public interface --------------------------------------------------------------------

    def add(
        self,
        name: str,
        value: object,
        *,
        replace: bool = False,
        delete_on_exit: bool = True,
        durable: bool = True,
    ) -> None:
        """Set the value of a key to ``str(value)``.

        Without ``durable``, a crash of the server that holds the key may lose or damage the value.

        Raises NameExistsError if the key exists and ``replace`` is false, InvalidNameError.
        """
        key = normalise(name)
        owner = self._owner if delete_on_exit else ""
        entry = NameEntry(checked_value(key, value), uuid.uuid4().hex, owner)
        added = self._add(key, entry, replace=replace, durable=durable)
        if not added and not self._inherit(key, entry):
            raise NameExistsError(f"key {key!r} exists already")
        if delete_on_exit:
            self._added[key] = entry
        else:
            self._added.pop(key, None)

    def get(self, name: str) -> str:
        """Return the value of a key. Raises NameNotFoundError."""
        key = normalise(name)
        entry = self._live(key)
        if entry is None:
            raise NameNotFoundError(f"no key {key!r}")
        return entry.value

    def add_subentry(self, root: str, value: object, *, delete_on_exit: bool = True) -> str:
        """Add a value below ``root`` under a name that no other process chooses; return the key.

        Raises InvalidNameError.
        """
        key = f"{normalise(root)}/{uuid.uuid4().hex}"
        self.add(key, value, delete_on_exit=delete_on_exit)
        return key

    def wait(self, name: str, timeout_s: float = math.inf, *, poll_s: float = 1.0) -> str:
        """Return the value of a key once it exists. Raises WaitTimeoutError.

        ``poll_s``: longest pause between two looks.
        """
        deadline = time.monotonic() + timeout_s
        backoff = Backoff(last_s=poll_s)
        while True:
            try:
                return self.get(name)
            except NameNotFoundError as error:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise WaitTimeoutError(f"{error} after {timeout_s:g} s") from error
                time.sleep(min(backoff.next_s(), left_s))
                self.refresh()

    def watch_names(
        self,
        names: Sequence[str],
        call_back: Callable[[], object],
        *,
        poll_s: float = 15.0,
        wait_s: float = 300.0,
    ) -> threading.Thread:
        """Call ``call_back`` once, when one of these keys no longer exists.

        Return the daemon thread that looks every ``poll_s`` seconds and calls.

        A key that does not exist yet may appear within ``wait_s``. While the store does not answer,
        nothing counts as gone.
        """
        keys = [normalise(name) for name in names]

        def watch() -> None:
            deadline = time.monotonic() + wait_s
            with suppress(NameNotFoundError, WaitTimeoutError):
                for key in keys:
                    left_s = max(0.0, deadline - time.monotonic())
                    retry("watch names", partial(self.wait, key, left_s, poll_s=poll_s))
                while keys:
                    time.sleep(poll_s)
                    retry("watch names", partial(self._require, keys))
            if keys:
                call_back()

        thread = threading.Thread(target=watch, name="watch names", daemon=True)
        thread.start()
        return thread

    def _require(self, keys: Sequence[str]) -> None:
        """Raise NameNotFoundError unless all keys exist."""
        self.refresh()
        for key in keys:
            self.get(key)

    def find_subtree(self, root: str) -> list[str]:
        """Return the sorted keys: ``root`` itself and all below ``root/``; ``""`` means all."""
        keys = self._below(normalise_root(root))
        if self._alive is nobody_dies:
            return keys
        return [key for key in keys if self._live(key) is not None]

    def get_subtree(self, root: str) -> list[str]:
        """Return the values of `find_subtree`'s keys, in its order."""
        entries = (self._live(key) for key in self._below(normalise_root(root)))
        return [entry.value for entry in entries if entry is not None]

    def entries(self, root: str = "") -> dict[str, NameEntry]:
        """Return all entries below ``root`` by sorted key, including those of dead owners."""
        found = ((key, self._get(key)) for key in self._below(normalise_root(root)))
        return {key: entry for key, entry in found if entry is not None}

    def delete(self, name: str) -> None:
        """Delete a key. Raises NameNotFoundError."""
        key = normalise(name)
        self._added.pop(key, None)
        if not self._delete(key):
            raise NameNotFoundError(f"no key {key!r}")

    def clear_subtree(self, root: str) -> None:
        """Delete ``root`` and all keys below it, of any owner; ``""`` means all."""
        for key in self._below(normalise_root(root)):
            self._added.pop(key, None)
            self._delete(key)

    def reset(self) -> None:
        """Delete the keys added here with ``delete_on_exit`` and not replaced since."""
        while self._added:
            self._delete_entry(*self._added.popitem())

    def _below(self, root: str) -> list[str]:
        return sorted(key for key in self._keys(root) if below(key, root))

    def _live(self, key: str) -> NameEntry | None:
        """Return the entry of a key, unless its owner is dead."""
        entry = self._get(key)
        return entry if entry is not None and self._lives(entry) else None

    def _lives(self, entry: NameEntry) -> bool:
        return not entry.owner or self._alive(entry.owner)

    def _inherit(self, key: str, entry: NameEntry) -> bool:
        """Take over the key of a dead owner."""
        there = self._get(key)
        return there is not None and not self._lives(there) and self._swap(key, there, entry)

    def __enter__(self) -> NameStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.reset()


VALUE_BYTES = 1 << 20
"""Limit on a value in UTF-8: a name store holds addresses and short notes, not data."""


def normalise(name: str) -> str:
    """Return the normal form of a key: ``a/``, ``./a`` and ``/a`` are ``a``, ``a//b`` is ``a/b``.

    Raises InvalidNameError.
    """
    if not isinstance(name, str):
        raise InvalidNameError(f"a key is a string, not {name!r}")
    key = posixpath.normpath(name.strip("/")) if name.strip("/") else "."
    if key == ".":
        raise InvalidNameError(f"empty key {name[:80]!r}")
    if ".." in name.split("/"):
        raise InvalidNameError(f"key {name[:80]!r}: '..' is not allowed")
    if not name.isprintable():
        raise InvalidNameError(f"key {name[:80]!r}: unprintable characters are not allowed")
    encode(key)
    return key


def normalise_root(root: str) -> str:
    """Like `normalise`, and the empty string (all keys) for ``""``, ``"/"`` and ``"."``."""
    return "" if isinstance(root, str) and root.strip("/") in ("", ".") else normalise(root)


def below(key: str, root: str) -> bool:
    """Return whether a key is ``root`` itself or below ``root/``."""
    return not root or key == root or key.startswith(f"{root}/")


@lru_cache(maxsize=4096)
def encode(key: str) -> str:
    """Return the file name of a key (one to one). Raises InvalidNameError if it is too long."""
    name = quote(key, safe="/").replace("/", "+")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > FILE_NAME_BYTES:
        raise InvalidNameError(
            f"key {key[:80]!r}… takes {len(name)} bytes encoded, at most {FILE_NAME_BYTES} fit"
        )
    return name


def decode(file_name: str) -> str | None:
    """Return the key of a file name; None for a file that no store created."""
    key = unquote(file_name.replace("+", "/"))
    try:
        return key if encode(normalise(key)) == file_name else None
    except InvalidNameError:
        return None


def checked_value(key: str, value: object) -> str:
    """Return a value as a string. Raises InvalidNameError if it is too long or not Unicode."""
    text = str(value)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidNameError(f"value of {key!r}: {error}") from error
    if size > VALUE_BYTES:
        raise InvalidNameError(f"value of {key!r} has {size} bytes, at most {VALUE_BYTES} fit")
    return text
