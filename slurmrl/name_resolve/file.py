"""Names in one directory that all hosts see: a file per key, its name the encoded key.

Flat, so that adding and deleting never race over directories. The content is a JSON object
``{"nonce": …, "value": …}``; the nonce tells writers apart (see `fsio.atomic.exclusive_create`).
"""

from __future__ import annotations

import json
from pathlib import Path

from slurmrl.errors import CorruptFileError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.name_resolve.base import Entry, NameStore
from slurmrl.name_resolve.names import decode, encode


class FileNameStore(NameStore):
    """``directory`` is made by whoever makes the run directory; without it every look finds
    nothing and every add raises EnvironmentFailure."""

    def __init__(self, directory: Path, *, calls: SystemCalls = REAL) -> None:
        super().__init__()
        self._directory = directory
        self._calls = calls

    def _path(self, key: str) -> Path:
        return self._directory / encode(key)

    def _add(self, key: str, entry: Entry, replace: bool) -> bool:
        path, data = self._path(key), _pack(entry)
        if replace:
            atomic.replace(path, data, calls=self._calls)
            return True
        return atomic.exclusive_create(path, data, calls=self._calls)

    def _get(self, key: str) -> str | None:
        path = self._path(key)
        try:
            data = atomic.read(path, calls=self._calls)
        except FileNotFoundError:
            return None
        return _unpack(data, path).value

    def _keys(self) -> list[str]:
        try:
            names = atomic.list_names(self._directory, calls=self._calls)
        except FileNotFoundError:
            return []
        return [key for name in names if (key := decode(name)) is not None]

    def _delete(self, key: str) -> bool:
        return atomic.remove(self._path(key), calls=self._calls)

    def _delete_entry(self, key: str, entry: Entry) -> None:
        atomic.remove_exactly(self._path(key), _pack(entry), calls=self._calls)

    def refresh(self) -> None:
        """List the directory: an NFS client may believe for a minute that a new file is missing,
        unless it learns that the directory has changed."""
        self._keys()


def _pack(entry: Entry) -> bytes:
    return json.dumps(entry._asdict()).encode()


def _unpack(data: bytes, path: Path) -> Entry:
    """Raises CorruptFileError."""
    try:
        content = json.loads(data)
        entry = Entry(content["value"], content["nonce"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not an entry of a name store: {error!r}") from error
    if not isinstance(entry.value, str) or not isinstance(entry.nonce, str):
        raise CorruptFileError(f"{path} is not an entry of a name store: not strings")
    return entry
