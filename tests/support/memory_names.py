"""Name store in memory: what the contract of stores means without files."""

from __future__ import annotations

import threading
from collections.abc import Callable

from slurmrl.name_resolve.base import NameEntry, NameStore, nobody_dies

_LOCK = threading.Lock()
"""One short-held lock for all stores, since several may share their entries."""


class MemoryNameStore(NameStore):
    """Stores with the same ``entries`` are views of one store; each change is atomic."""

    def __init__(
        self,
        *,
        entries: dict[str, NameEntry] | None = None,
        owner: str = "",
        alive: Callable[[str], bool] = nobody_dies,
    ) -> None:
        super().__init__(owner=owner, alive=alive)
        self._entries: dict[str, NameEntry] = {} if entries is None else entries

    def _add(self, key: str, entry: NameEntry, *, replace: bool, durable: bool) -> bool:
        with _LOCK:
            if key in self._entries and not replace:
                return False
            self._entries[key] = entry
            return True

    def _get(self, key: str) -> NameEntry | None:
        return self._entries.get(key)

    def _swap(self, key: str, old: NameEntry, new: NameEntry) -> bool:
        with _LOCK:
            if self._entries.get(key) != old:
                return False
            self._entries[key] = new
            return True

    def _keys(self, root: str) -> list[str]:
        with _LOCK:
            return list(self._entries)

    def _delete(self, key: str) -> bool:
        return self._entries.pop(key, None) is not None

    def _delete_entry(self, key: str, entry: NameEntry) -> None:
        with _LOCK:
            if self._entries.get(key) == entry:
                del self._entries[key]

    def refresh(self) -> None:
        """Nothing can hide an entry here."""
