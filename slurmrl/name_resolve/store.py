"""Name store in a shared directory: one value per key.

If several processes add a key at the same time, one of them succeeds. There is one file per key,
named by the encoded key. The directory is flat, so that additions and deletions never race over
subdirectories. Each file holds a JSON object with the value and a nonce that identifies its writer
(see `fsio.atomic.exclusive_create`).
"""

from __future__ import annotations

import json
import posixpath
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from math import inf
from pathlib import Path
from urllib.parse import quote, unquote

from slurmrl.backoff import Backoff, retry
from slurmrl.errors import InvalidNameError, NameExistsError, NameNotFoundError
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.calls import REAL, SystemCalls, explain
from slurmrl.fsio.documents import FILE_NAME_BYTES, TEXT, Fields, FieldType

NONCE = FieldType("letters and digits", lambda value: isinstance(value, str) and value.isalnum())
FIELDS: Fields = {"value": TEXT, "nonce": NONCE}


class NameStore:
    """A store of strings by keys, which are paths like ``attempt/trainer/0/1``.

    A key (see `normalize`) can have a value and be a prefix of other keys at once.

    `submit` creates the directory with the run directory. Without the directory, reads find nothing
    and adds raise EnvironmentFailure. `reset` deletes the keys that this object added with
    ``delete_on_exit``.
    """

    def __init__(self, directory: Path, *, calls: SystemCalls = REAL) -> None:
        self._directory = directory
        self._calls = calls
        self._paths: dict[str, Path] = {}
        """Cache that maps keys to paths. Making a path takes longer than reading its file."""
        self._temporary: dict[str, bytes] = {}
        """Contents of the keys that `reset` deletes."""

    def add(
        self,
        name: str,
        value: object,
        *,
        replace: bool = False,
        delete_on_exit: bool = False,
        durable: bool = True,
    ) -> None:
        """Set the value of a key to ``str(value)``.

        Without ``durable``, a crash of the file server may lose or damage the value. Raises
        InvalidNameError, and NameExistsError if the key exists and ``replace`` is false.
        """
        key = normalize(name)
        entry = {"value": checked_value(key, value), "nonce": uuid.uuid4().hex}
        path, data = self._path(key), json.dumps(entry).encode()
        if replace:
            atomic.replace(path, data, durable=durable, calls=self._calls)
        elif not atomic.exclusive_create(path, data, durable=durable, calls=self._calls):
            raise NameExistsError(f"key {key!r} exists already")
        if delete_on_exit:
            self._temporary[key] = data
        else:
            self._temporary.pop(key, None)

    def get(self, name: str) -> str:
        """Return the value of a key. Raises NameNotFoundError."""
        key = normalize(name)
        value = self._read(key)
        if value is None:
            raise NameNotFoundError(f"no key {key!r}")
        return value

    def find_subtree(self, root: str) -> list[str]:
        """Return the sorted keys that exist: ``root`` and keys below it, or all keys for ``""``."""
        root = normalize_root(root)
        try:
            names = atomic.list_names(self._directory, calls=self._calls)
        except FileNotFoundError:
            return []
        start = encode(root) if root else ""
        mine = (decode(name) for name in names if name.startswith(start))
        return sorted(key for key in mine if key is not None and below(key, root))

    def get_subtree(self, root: str) -> list[str]:
        """Return the values of the keys that `find_subtree` returns, in the same order."""
        values = map(self._read, self.find_subtree(root))
        return [value for value in values if value is not None]

    def add_subentry(self, name: str, value: object, *, delete_on_exit: bool = True) -> str:
        """Add a value under a new key below ``name``; return the key, such as ``name/1f00c2d4``."""
        key = f"{normalize(name)}/{uuid.uuid4().hex[:8]}"
        self.add(key, value, delete_on_exit=delete_on_exit)
        return key

    def wait(self, name: str, *, timeout_s: float = inf) -> str:
        """Wait for a key; return its value. Raises NameNotFoundError, EnvironmentFailure."""
        pauses, end = Backoff(0.02, 1.0), time.monotonic() + timeout_s
        look = partial(self._look, key := normalize(name))
        while (value := retry("read names", look, timeout_s=end - time.monotonic())) is None:
            if (left_s := end - time.monotonic()) <= 0:
                raise NameNotFoundError(f"no key {key!r} within {timeout_s:g} s")
            time.sleep(min(pauses.next_s(), left_s))
        return value

    def watch_names(
        self, names: Sequence[str], callback: Callable[[], object], *, timeout_s: float = 300.0
    ) -> threading.Thread:
        """In the returned thread, call ``callback`` once after all ``names`` are deleted.

        A name that does not appear within ``timeout_s`` counts as deleted.
        """
        keys = {*map(normalize, [names] if isinstance(names, str) else names)}
        seen = {key for key in keys if self._look(key) is not None}
        given = (keys, seen, callback, time.monotonic() + timeout_s)
        watch = threading.Thread(target=self._watch, args=given, daemon=True)
        watch.start()
        return watch

    def clear_subtree(self, root: str) -> None:
        """Delete the keys of `find_subtree`."""
        for key in self.find_subtree(root):
            with suppress(NameNotFoundError):  # Another process may delete the key first.
                self.delete(key)

    def delete(self, name: str) -> None:
        """Delete a key. Raises NameNotFoundError."""
        key = normalize(name)
        self._temporary.pop(key, None)
        if not atomic.remove(self._path(key), calls=self._calls):
            raise NameNotFoundError(f"no key {key!r}")

    def reset(self) -> None:
        """Delete the keys added with ``delete_on_exit``, unless other writers replaced them."""
        while self._temporary:
            key, data = self._temporary.popitem()
            atomic.remove_exactly(self._path(key), data, calls=self._calls)

    def refresh(self) -> None:
        """List the directory, so that an NFS client notices new files.

        Otherwise the client may report a new file as missing for a minute. Raises
        EnvironmentFailure if the directory does not answer or was removed.
        """
        try:
            atomic.list_names(self._directory, calls=self._calls)
        except FileNotFoundError as error:
            raise explain(error, "list", self._directory) from error

    def _look(self, key: str) -> str | None:
        self.refresh()
        return self._read(key)

    def _watch(
        self, keys: set[str], seen: set[str], callback: Callable[[], object], deadline: float
    ) -> None:
        pauses = Backoff(0.02, 1.0)
        while keys:
            values = {key: retry("read names", partial(self._look, key)) for key in keys}
            there = {key for key, value in values.items() if value is not None}
            seen |= there
            keys = there if time.monotonic() >= deadline else keys - (seen - there)
            time.sleep(pauses.next_s() if keys else 0)
        callback()

    def _path(self, key: str) -> Path:
        path = self._paths.get(key)
        if path is None:
            path = self._paths[key] = self._directory / encode(key)
        return path

    def _read(self, key: str) -> str | None:
        path = self._path(key)
        try:
            data = atomic.read(path, calls=self._calls)
        except FileNotFoundError:
            return None
        subject = f"{path} is not an entry of a name store: it"
        value: str = documents.parse(data, subject, FIELDS, ("value", "nonce"))["value"]
        return value


VALUE_BYTES = 1 << 20
"""Maximum bytes of a value in UTF-8. A name store holds addresses and short notes, not data."""


def normalize(name: str) -> str:
    """Return the normal form of a key: ``./a`` and ``/a/`` become ``a``, ``a//b`` becomes ``a/b``.

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


def normalize_root(root: str) -> str:
    """Return the normal form of a key, or ``""`` (all keys) for ``""``, ``"/"`` and ``"."``."""
    return "" if isinstance(root, str) and root.strip("/") in ("", ".") else normalize(root)


def below(key: str, root: str) -> bool:
    """Return whether a key is ``root`` or begins with ``root/``. Every key is below ``""``."""
    return not root or key == root or key.startswith(f"{root}/")


@lru_cache(maxsize=4096)
def encode(key: str) -> str:
    """Return the unique file name of a key. Raises InvalidNameError if the name is too long."""
    name = quote(key, safe="/").replace("/", "+")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > FILE_NAME_BYTES:
        raise InvalidNameError(
            f"key {key[:80]!r}… is too long: {len(name)} bytes encoded, at most {FILE_NAME_BYTES}"
        )
    return name


def decode(file_name: str) -> str | None:
    """Return the key of a file name, or None if no store creates such a name."""
    key = unquote(file_name.replace("+", "/"))
    try:
        return key if encode(normalize(key)) == file_name else None
    except InvalidNameError:
        return None


def checked_value(key: str, value: object) -> str:
    """Return ``str(value)``. Raises InvalidNameError for a text that is too long or not Unicode."""
    text = str(value)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidNameError(f"value of {key!r}: {error}") from error
    if size > VALUE_BYTES:
        raise InvalidNameError(f"value of {key!r} has {size} bytes, but at most {VALUE_BYTES} fit")
    return text
