"""Name store in a shared directory: one file per key, named by the encoded key.

The directory is flat, so that adding and deleting never race over subdirectories. The content is
a `NameEntry` whose nonce identifies its writer (see `fsio.atomic.exclusive_create`).

A dead owner's key goes to the process that wins the exclusive create of ``.heir.<nonce>`` (the
nonce of the dead entry) and then replaces the dead entry. The key never disappears, so no exclusive
add can intervene. Heirs that die have heirs in turn. Readers follow this chain to its end, so an
heir that was paused before its replace, and resumes after its own heir has won, takes nothing back.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.failures import explain
from slurmrl.name_resolve.base import NameEntry, NameStore, decode, encode, nobody_dies

HEIR_PREFIX = ".heir."


class FileNameStore(NameStore):
    """A store with one file per key in ``directory``.

    The directory is created with the run directory. Without it, reads find nothing and adds raise
    EnvironmentFailure.
    """

    def __init__(
        self,
        directory: Path,
        *,
        owner: str = "",
        alive: Callable[[str], bool] = nobody_dies,
        calls: SystemCalls = REAL,
    ) -> None:
        super().__init__(owner=owner, alive=alive)
        self._directory = directory
        self._calls = calls
        self._paths: dict[str, Path] = {}
        """Cache of paths by key: making a path takes longer than reading its file."""

    def _path(self, key: str) -> Path:
        path = self._paths.get(key)
        if path is None:
            path = self._paths[key] = self._directory / encode(key)
        return path

    def _add(self, key: str, entry: NameEntry, *, replace: bool, durable: bool) -> bool:
        path, data = self._path(key), entry.to_json()
        if replace:
            atomic.replace(path, data, durable=durable, calls=self._calls)
            return True
        return atomic.exclusive_create(path, data, durable=durable, calls=self._calls)

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

    def _keys(self, root: str) -> list[str]:
        try:
            names = atomic.list_names(self._directory, calls=self._calls)
        except FileNotFoundError:
            return []
        start = encode(root) if root else ""
        mine = (name for name in names if name.startswith(start))
        return [key for name in mine if (key := decode(name)) is not None]

    def _swap(self, key: str, old: NameEntry, new: NameEntry) -> bool:
        path = self._path(key)
        dead: NameEntry | None = old
        while dead is not None and not self._lives(dead):
            heir = _heir(path, dead)
            if atomic.exclusive_create(heir, new.to_json(), calls=self._calls):
                atomic.replace(path, new.to_json(), calls=self._calls)
                return True
            dead = self._read(heir)
        return False

    def _delete(self, key: str) -> bool:
        return atomic.remove(self._path(key), calls=self._calls)

    def _delete_entry(self, key: str, entry: NameEntry) -> None:
        atomic.remove_exactly(self._path(key), entry.to_json(), calls=self._calls)

    def refresh(self) -> None:
        """List the directory, so that an NFS client notices that it has changed.

        Until then, the client may believe for a minute that a new file is missing.
        """
        try:
            atomic.list_names(self._directory, calls=self._calls)
        except FileNotFoundError as error:
            raise explain(error, "list", self._directory) from error


def _heir(path: Path, dead: NameEntry) -> Path:
    return path.with_name(f"{HEIR_PREFIX}{dead.nonce}")
