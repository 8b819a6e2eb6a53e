"""Leases: the holder increments a counter. Observers check by their own clocks if it grows.

Observers use no clock and no file time of another machine. Time counts only while the directory
answers, so a stalled file system does not look like a dead holder.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import (
    NO_FILE,
    REAL,
    SystemCalls,
    explain,
    make_private,
    opened,
    pwrite_all,
    unreadable,
)

DIGITS = 20
NOTE_BYTES = 64 * 1024
GAPS_PER_TTL = 4
"""Divisor of the TTL. The time between two reads counts as at most 1/4 of the TTL, because the
observer itself may have been suspended or blocked."""


class Lease:
    """A lease as its holder sees it: a file with a single writer."""

    def __init__(self, path: Path, *, calls: SystemCalls = REAL) -> None:
        self._path = path
        self._calls = calls
        self._counter = 0

    def beat(self, note: bytes = b"") -> None:
        """Increment the counter and write ``note`` after it.

        A reader can see a partial note. If ``note`` is shorter than the last note, the end of the
        last note stays. An object that has replaced the file is moved aside, and the next beat
        creates the file. Raises EnvironmentFailure; the holder must then start nothing new.
        """
        self._counter += 1
        data = f"{self._counter:0{DIGITS}d}\n".encode() + note[:NOTE_BYTES]
        try:
            with opened(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, self._calls) as file:
                if self._counter == 1:
                    make_private(file, self._calls)
                pwrite_all(file, data, 0, self._calls)
        except OSError as error:
            if error.errno in (*NO_FILE, errno.EACCES):
                with suppress(OSError):
                    self._move_aside()
            raise explain(error, "beat the lease", self._path) from error

    def _move_aside(self) -> None:
        """Rename the object at the path of the lease, unless it is a regular file of this user."""
        found = self._calls.lstat(self._path)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            return
        aside = self._path.with_name(f"{self._path.name}.replaced-{self._counter}")
        self._calls.rename(self._path, aside)


def read_counter(path: Path, *, calls: SystemCalls = REAL) -> int | None:
    """Return the counter; None without a file or after an incomplete first write.

    Raises EnvironmentFailure if the directory does not answer or is gone, CorruptFileError if the
    path is not a regular file.
    """
    return _read(path, calls)[0]


def _read(path: Path, calls: SystemCalls) -> tuple[int | None, bytes]:
    """Return the counter and the note."""
    try:
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW, calls) as file:
            text = calls.read(file, DIGITS + 1 + NOTE_BYTES)
    except FileNotFoundError:
        _look_again(path.parent, calls)
        return None, b""
    except OSError as error:
        raise unreadable(error, path, "remove it: its holder creates it again") from error
    if not text[:DIGITS].isdigit() or text[DIGITS : DIGITS + 1] != b"\n":
        return None, b""
    return int(text[:DIGITS]), text[DIGITS + 1 :]


def _look_again(directory: Path, calls: SystemCalls) -> None:
    """List the directory, which makes an NFS client drop its cached absence of the file."""
    try:
        atomic.list_names(directory, calls=calls)
    except FileNotFoundError as error:
        raise explain(error, "list", directory) from error


@dataclass(frozen=True)
class LeaseView:
    alive: bool
    age_s: float
    """Seconds since the observer last saw a change of the counter."""
    counter: int | None
    note: bytes = b""
    """The note that the holder wrote after the counter."""


class LeaseObserver:
    """A lease as an observer sees it. Call `observe` at least 4 times per TTL.

    At least 4 reads without a change are needed to detect the death of the holder.
    """

    def __init__(
        self,
        path: Path,
        ttl_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        *,
        calls: SystemCalls = REAL,
    ) -> None:
        self._path = path
        self._ttl_s = ttl_s
        self._clock = clock
        self._calls = calls
        self._counter: int | None = None
        self._note = b""
        self._age_s = 0.0
        self._looked_at: float | None = None
        """Time at which the last read ended; None if the read failed."""

    def observe(self) -> LeaseView:
        """Read the lease once. The time after a failed read does not count."""
        before = self._clock()
        try:
            counter, note = _read(self._path, self._calls)
        except (EnvironmentFailure, CorruptFileError):
            self._looked_at = None
            return self._view()
        if counter is not None and counter != self._counter:
            self._counter, self._note = counter, note
            self._age_s = 0.0
        elif self._looked_at is not None:
            self._age_s += min(before - self._looked_at, self._ttl_s / GAPS_PER_TTL)
        self._looked_at = self._clock()
        return self._view()

    def _view(self) -> LeaseView:
        return LeaseView(self._age_s < self._ttl_s, self._age_s, self._counter, self._note)


class LeaseBoard:
    """Observers of the leases in a directory, one for each file name.

    Each lease is read at most once per ``look_s``, however often callers request its view.
    """

    def __init__(
        self,
        directory: Path,
        ttl_s: float = 60.0,
        *,
        look_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._ttl_s = ttl_s
        self._look_s = look_s
        self._clock = clock
        self._observers: dict[str, LeaseObserver] = {}
        self._views: dict[str, tuple[float, LeaseView]] = {}

    def view(self, name: str) -> LeaseView:
        now = self._clock()
        known = self._views.get(name)
        if known is not None and now - known[0] < self._look_s:
            return known[1]
        if name not in self._observers:
            path = self._directory / name
            self._observers[name] = LeaseObserver(path, self._ttl_s, self._clock)
        view = self._observers[name].observe()
        self._views[name] = (now, view)
        return view

    def alive(self, name: str) -> bool:
        return self.view(name).alive
