"""A client's view of a shared disk through stale caches.

For up to ``cache_s``, a client may see a removed entry, miss a new entry (negative entries), and
see an old listing or an old file size, which hides new bytes. Changes by the client reach the
server immediately and drop the client's cached entry.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from slurmrl.fsio.calls import SystemCalls
from tests.support.disk import Directory, Disk, DiskCalls, File, failure
from tests.support.faulty import Clock


class StaleCalls(DiskCalls):
    def __init__(self, disk: Disk, clock: Clock, cache_s: float) -> None:
        super().__init__(disk)
        self._clock = clock
        self._cache_s = cache_s
        self._entries: dict[Path, tuple[float, File | Directory | None]] = {}
        self._listings: dict[Path, tuple[float, list[str]]] = {}
        self._sizes: dict[File, tuple[float, int]] = {}

    def sleep(self, seconds: float) -> None:
        self._clock.advance(seconds)

    def caches(self, directory: Path) -> bool:
        return True

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        if flags & os.O_CREAT:
            self._entries.pop(path, None)
            return super().open(path, flags, mode)
        entry = self._look_up(path)
        if entry is None:
            raise failure(errno.ENOENT, path)
        assert isinstance(entry, File)
        if not entry.links:
            del self._entries[path]
            raise failure(errno.ESTALE, path)
        return self.handle(entry)

    def pread(self, descriptor: int, count: int, offset: int) -> bytes:
        file = self.opened[descriptor].file
        known = self._sizes.get(file)
        if known is None or self._old(known[0]):
            known = self._sizes[file] = (self._clock(), len(file.data))
        return super().pread(descriptor, max(min(count, known[1] - offset), 0), offset)

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        self._sizes.pop(self.opened[descriptor].file, None)
        return super().pwrite(descriptor, data, offset)

    def stat(self, path: Path) -> os.stat_result:
        if self._look_up(path) is None:
            raise failure(errno.ENOENT, path)
        return SystemCalls.stat(self, Path("/"))

    def link(self, source: Path, target: Path) -> None:
        known = self._entries.pop(target, None)
        if known is not None and known[1] is not None and not self._old(known[0]):
            raise failure(errno.EEXIST, target)
        super().link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._entries.pop(source, None)
        self._entries.pop(target, None)

    def unlink(self, path: Path) -> None:
        self._entries.pop(path, None)
        super().unlink(path)

    def listdir(self, directory: Path) -> Iterable[str]:
        known = self._listings.get(directory)
        if known is None or self._old(known[0]):
            known = (self._clock(), list(super().listdir(directory)))
            self._listings[directory] = known
        return list(known[1])

    def _look_up(self, path: Path) -> File | Directory | None:
        known = self._entries.get(path)
        if known is None or self._old(known[0]):
            known = (self._clock(), self.disk.directory(path.parent).entries.get(path.name))
            self._entries[path] = known
        return known[1]

    def _old(self, since_s: float) -> bool:
        return self._clock() - since_s >= self._cache_s
