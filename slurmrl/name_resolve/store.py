"""Name store in a shared directory: one value per key; of concurrent exclusive adds one wins.

There is one file per key, named by the encoded key. The directory is flat, so that adding and
deleting never race over subdirectories. The content is a `NameEntry` whose nonce identifies its
writer (see `fsio.atomic.exclusive_create`).

A dead owner's key goes to the process that wins the exclusive create of ``.heir.<nonce>`` (the
nonce of the dead entry) and then replaces the dead entry. The key never disappears, so no exclusive
add can intervene. Heirs that die have heirs in turn. Readers follow this chain to its end, so an
heir that was paused before its replace, and resumes after its own heir has won, takes nothing back.
"""

from __future__ import annotations

import json
import posixpath
import uuid
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple
from urllib.parse import quote, unquote

from slurmrl.errors import InvalidNameError, NameExistsError, NameNotFoundError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.failures import explain
from slurmrl.fsio.shapes import FILE_NAME_BYTES, TEXT, Fields, FieldType

HEIR_PREFIX = ".heir."
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


class NameStore:
    """A store of strings by keys, which are paths like ``attempt/trainer/0/1``.

    A key (see `normalise`) can have a value and be a prefix of other keys at once.

    The directory is created with the run directory. Without it, reads find nothing and adds raise
    EnvironmentFailure.

    Keys added with ``delete_on_exit`` exist as long as their process: `reset` deletes them. If the
    process dies first, its keys expire with its lease (``owner`` is the file name of that lease). A
    store whose ``alive`` reports an owner as dead hides the owner's keys and lets the next add take
    them over. As a context manager a store calls `reset` on exit.
    """

    def __init__(
        self,
        directory: Path,
        *,
        owner: str = "",
        alive: Callable[[str], bool] = nobody_dies,
        calls: SystemCalls = REAL,
    ) -> None:
        self._directory = directory
        self._owner = owner
        self._alive = alive
        self._calls = calls
        self._paths: dict[str, Path] = {}
        """Cache of paths by key: making a path takes longer than reading its file."""
        self._added: dict[str, NameEntry] = {}
        """Keys that `reset` deletes."""

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
        path, data = self._path(key), entry.to_json()
        if replace:
            atomic.replace(path, data, durable=durable, calls=self._calls)
        elif not (
            atomic.exclusive_create(path, data, durable=durable, calls=self._calls)
            or self._inherit(key, entry)
        ):
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
        if not atomic.remove(self._path(key), calls=self._calls):
            raise NameNotFoundError(f"no key {key!r}")

    def reset(self) -> None:
        """Delete the keys added here with ``delete_on_exit`` and not replaced since."""
        while self._added:
            key, entry = self._added.popitem()
            atomic.remove_exactly(self._path(key), entry.to_json(), calls=self._calls)

    def refresh(self) -> None:
        """List the directory, so that an NFS client notices that it has changed.

        Until then, the client may believe for a minute that a new file is missing. Raises
        EnvironmentFailure if the directory does not answer or is gone.
        """
        try:
            atomic.list_names(self._directory, calls=self._calls)
        except FileNotFoundError as error:
            raise explain(error, "list", self._directory) from error

    def _below(self, root: str) -> list[str]:
        """Return the sorted keys: ``root`` itself and all below it, of any owner."""
        try:
            names = atomic.list_names(self._directory, calls=self._calls)
        except FileNotFoundError:
            return []
        start = encode(root) if root else ""
        mine = (decode(name) for name in names if name.startswith(start))
        return sorted(key for key in mine if key is not None and below(key, root))

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

    def _path(self, key: str) -> Path:
        path = self._paths.get(key)
        if path is None:
            path = self._paths[key] = self._directory / encode(key)
        return path

    def _get(self, key: str) -> NameEntry | None:
        path = self._path(key)
        entry = self._read(path)
        while entry is not None and entry.owner:
            heir = self._read(_heir(path, entry))
            if heir is None:
                break
            entry = heir
        return entry

    def _read(self, path: Path) -> NameEntry | None:
        try:
            data = atomic.read(path, calls=self._calls)
        except FileNotFoundError:
            return None
        return NameEntry.from_json(data, path)

    def _swap(self, key: str, old: NameEntry, new: NameEntry) -> bool:
        """Replace a dead owner's entry ``old`` by ``new``; False if another process did so first.

        At most one of several processes succeeds, and the key exists all the time.
        """
        path = self._path(key)
        dead: NameEntry | None = old
        while dead is not None and not self._lives(dead):
            heir = _heir(path, dead)
            if atomic.exclusive_create(heir, new.to_json(), calls=self._calls):
                atomic.replace(path, new.to_json(), calls=self._calls)
                return True
            dead = self._read(heir)
        return False

    def __enter__(self) -> NameStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.reset()


def _heir(path: Path, dead: NameEntry) -> Path:
    return path.with_name(f"{HEIR_PREFIX}{dead.nonce}")


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
