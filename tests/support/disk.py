"""A disk in memory that simulates a crash of the file server.

A file's bytes are durable after fsync of the file, and an entry (a name made, moved or removed)
after fsync of its directory. Each other change may or may not survive a crash, independently of
the rest. POSIX promises no more, and most file systems do.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmrl.fsio.calls import SystemCalls


@dataclass(eq=False)
class File:
    data: bytearray = field(default_factory=bytearray)
    safe: bytes = b""
    """The content that fsync has made durable."""
    links: int = 0
    version: int = 0
    """Number of changes of the content."""


@dataclass(eq=False)
class Directory:
    entries: dict[str, File | Directory] = field(default_factory=dict)
    safe: dict[str, File | Directory] = field(default_factory=dict)
    """The entries that fsync has made durable."""


Tree = dict[str, Any]
"""Contents by name; directories are trees."""


def failure(number: int, path: object) -> OSError:
    return OSError(number, os.strerror(number), str(path))


class Disk:
    """The true state on the file server."""

    def __init__(self, root: Path = Path("/disk")) -> None:
        self.root = root
        self.top = Directory()

    def directory(self, path: Path) -> Directory:
        found: File | Directory = self.top
        for name in path.relative_to(self.root).parts:
            if not isinstance(found, Directory):
                raise failure(errno.ENOTDIR, path)
            if name not in found.entries:
                raise failure(errno.ENOENT, path)
            found = found.entries[name]
        if not isinstance(found, Directory):
            raise failure(errno.ENOTDIR, path)
        return found

    def find(self, path: Path) -> File | Directory:
        if path == self.root:
            return self.top
        entries = self.directory(path.parent).entries
        if path.name not in entries:
            raise failure(errno.ENOENT, path)
        return entries[path.name]

    def crash(self, keep: Callable[[], bool]) -> Tree:
        """Return the state after a crash. ``keep`` decides for each change that is not durable
        whether it survives.
        """
        return _left(self.top, keep)


def _left(directory: Directory, keep: Callable[[], bool]) -> Tree:
    tree: Tree = {}
    for name in sorted(directory.entries.keys() | directory.safe.keys()):
        now, safe = directory.entries.get(name), directory.safe.get(name)
        entry = now if now is safe or keep() else safe
        if isinstance(entry, Directory):
            tree[name] = _left(entry, keep)
        elif entry is not None:
            tree[name] = bytes(entry.data) if entry.data == entry.safe or keep() else entry.safe
    return tree


def drop_all() -> bool:
    return False


def keep_all() -> bool:
    return True


def some(seed: object) -> Callable[[], bool]:
    chance = random.Random(str(seed))
    return lambda: chance.random() < 0.5


def write_out(tree: Tree, folder: Path) -> None:
    """Copy the state after a crash into a real folder, to read it with the real code."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tree.items():
        if isinstance(content, dict):
            write_out(content, folder / name)
        else:
            (folder / name).write_bytes(content)


@dataclass
class Opened:
    file: File
    position: int = 0


class DiskCalls(SystemCalls):
    """File operations on a disk by a client without a cache. ``after`` is called after each."""

    def __init__(self, disk: Disk, after: Callable[[str], None] = lambda name: None) -> None:
        self.disk = disk
        self.after = after
        self.opened: dict[int, Opened] = {}
        self._descriptor = 100

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        entries = self.disk.directory(path.parent).entries
        file = entries.get(path.name)
        if file is None and not flags & os.O_CREAT:
            raise failure(errno.ENOENT, path)
        if file is not None and flags & os.O_CREAT and flags & os.O_EXCL:
            raise failure(errno.EEXIST, path)
        if isinstance(file, Directory):
            raise failure(errno.EISDIR, path)
        if file is None:
            file = entries[path.name] = File(links=1)
        self.after("open")
        return self.handle(file)

    def handle(self, file: File) -> int:
        self._descriptor += 1
        self.opened[self._descriptor] = Opened(file)
        return self._descriptor

    def close(self, descriptor: int) -> None:
        del self.opened[descriptor]
        self.after("close")

    def read(self, descriptor: int, count: int) -> bytes:
        opened = self.opened[descriptor]
        data = self.pread(descriptor, count, opened.position)
        opened.position += len(data)
        return data

    def pread(self, descriptor: int, count: int, offset: int) -> bytes:
        return bytes(self.opened[descriptor].file.data[offset : offset + count])

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        opened = self.opened[descriptor]
        opened.position += self.pwrite(descriptor, data, opened.position)
        return len(data)

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        file = self.opened[descriptor].file
        if len(file.data) < offset:
            file.data.extend(bytes(offset - len(file.data)))
        file.data[offset : offset + len(data)] = data
        file.version += 1
        self.after("pwrite")
        return len(data)

    def fsync(self, descriptor: int) -> None:
        file = self.opened[descriptor].file
        file.safe = bytes(file.data)
        self.after("fsync")

    def mode(self, descriptor: int) -> int:
        return 0o600

    def chmod(self, target: int | Path, mode: int) -> None:
        pass

    def stat(self, path: Path) -> os.stat_result:
        kind = 0o040700 if isinstance(self.disk.find(path), Directory) else 0o100600
        return os.stat_result((kind, 0, 0, 1, os.getuid(), 0, 0, 0, 0, 0))

    def link(self, source: Path, target: Path) -> None:
        file = self.disk.find(source)
        entries = self.disk.directory(target.parent).entries
        if target.name in entries:
            raise failure(errno.EEXIST, target)
        assert isinstance(file, File)
        file.links += 1
        entries[target.name] = file
        self.after("link")

    def rename(self, source: Path, target: Path) -> None:
        file = self.disk.find(source)
        replaced = self.disk.directory(target.parent).entries.get(target.name)
        if isinstance(replaced, File):
            replaced.links -= 1
        del self.disk.directory(source.parent).entries[source.name]
        self.disk.directory(target.parent).entries[target.name] = file
        self.after("rename")

    def unlink(self, path: Path) -> None:
        file = self.disk.find(path)
        if isinstance(file, Directory):
            raise failure(errno.EISDIR, path)
        file.links -= 1
        del self.disk.directory(path.parent).entries[path.name]
        self.after("unlink")

    def listdir(self, directory: Path) -> Iterable[str]:
        return list(self.disk.directory(directory).entries)

    def mkdir(self, path: Path, mode: int = 0o700) -> None:
        entries = self.disk.directory(path.parent).entries
        if path.name in entries:
            raise failure(errno.EEXIST, path)
        entries[path.name] = Directory()
        self.after("mkdir")

    def fsync_directory(self, directory: Path) -> None:
        found = self.disk.directory(directory)
        found.safe = dict(found.entries)
        self.after("fsync_directory")

    def sleep(self, seconds: float) -> None:
        pass
