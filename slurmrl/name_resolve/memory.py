"""Names in this process's memory: for tests, and for runs within one process."""

from __future__ import annotations

import threading

from slurmrl.name_resolve.base import Entry, NameStore


class MemoryNameStore(NameStore):
    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}

    def _add(self, key: str, entry: Entry, replace: bool) -> bool:
        with self._lock:
            if key in self._entries and not replace:
                return False
            self._entries[key] = entry
            return True

    def _get(self, key: str) -> str | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def _keys(self) -> list[str]:
        with self._lock:
            return list(self._entries)

    def _delete(self, key: str) -> bool:
        return self._entries.pop(key, None) is not None

    def _delete_entry(self, key: str, entry: Entry) -> None:
        with self._lock:
            if self._entries.get(key) == entry:
                del self._entries[key]

    def refresh(self) -> None:
        """Nothing can hide an entry here."""
