"""Leases: a holder's counter moves; an observer judges by its own clock whether it still does.

No clock or file time of another machine is looked at. The observer's clock advances only while
the directory answers it, so that a stalled file system looks like silence to nobody.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.fsio.failures import explain, unreadable
from slurmrl.fsio.primitives import make_private, opened, pwrite_all

DIGITS = 20
NOTE_BYTES = 64 * 1024
GAPS_PER_TTL = 4
"""The time between two looks counts for at most this part of the TTL: an observer that was itself
suspended, or hung in a write of its own, has not been watching."""


class Lease:
    """The holder's side: one file that nobody else writes."""

    def __init__(self, path: Path, *, calls: SystemCalls = REAL) -> None:
        self._path = path
        self._calls = calls
        self._counter = 0

    def beat(self, note: bytes = b"") -> None:
        """Move the counter. Raises EnvironmentFailure: then the holder must start nothing new.

        ``note`` is written behind the counter, at no cost of its own. Where it is shorter than the
        one before, the rest of that stays behind it; a reader can see half of it.
        """
        self._counter += 1
        data = f"{self._counter:0{DIGITS}d}\n".encode() + note[:NOTE_BYTES]
        try:
            with opened(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, self._calls) as file:
                if self._counter == 1:
                    make_private(file, self._calls)
                pwrite_all(file, data, 0, self._calls)
        except OSError as error:
            raise explain(error, "beat the lease", self._path) from error


def read_counter(path: Path, *, calls: SystemCalls = REAL) -> int | None:
    """The counter; None where there is none (no file yet, or half of the first write).

    Raises EnvironmentFailure if the directory does not answer or is gone, CorruptFileError for
    what is no regular file.
    """
    return _read(path, calls)[0]


def _read(path: Path, calls: SystemCalls) -> tuple[int | None, bytes]:
    """Counter and note."""
    try:
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW, calls) as file:
            text = calls.read(file, DIGITS + 1 + NOTE_BYTES)
    except FileNotFoundError:
        _look_again(path.parent, calls)
        return None, b""
    except OSError as error:
        raise unreadable(error, path, "remove it: its holder makes it again") from error
    if not text[:DIGITS].isdigit() or text[DIGITS : DIGITS + 1] != b"\n":
        return None, b""
    return int(text[:DIGITS]), text[DIGITS + 1 :]


def _look_again(directory: Path, calls: SystemCalls) -> None:
    """List the directory, so that an NFS client does not go on believing that a file is missing."""
    try:
        atomic.list_names(directory, calls=calls)
    except FileNotFoundError as error:
        raise explain(error, "list", directory) from error


@dataclass(frozen=True)
class LeaseView:
    alive: bool
    age_s: float
    """Seconds for which the counter was seen not to move."""
    counter: int | None
    note: bytes = b""
    """What the holder wrote behind the counter."""


class LeaseObserver:
    """The observer's side. Look at least four times per TTL; dead needs as many looks."""

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
        """End of the last look, if that one succeeded."""

    def observe(self) -> LeaseView:
        """Look once. A look that fails changes nothing but stops the clock until the next one."""
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
    """Observers of all leases in a directory, by file name. Each lease is looked at once per
    ``look_s`` at most, however often it is asked for."""

    def __init__(
        self,
        directory: Path,
        ttl_s: float = 60.0,
        *,
        look_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        calls: SystemCalls = REAL,
    ) -> None:
        self._directory = directory
        self._ttl_s = ttl_s
        self._look_s = look_s
        self._clock = clock
        self._calls = calls
        self._observers: dict[str, LeaseObserver] = {}
        self._views: dict[str, tuple[float, LeaseView]] = {}

    def view(self, name: str) -> LeaseView:
        now = self._clock()
        known = self._views.get(name)
        if known is not None and now - known[0] < self._look_s:
            return known[1]
        if name not in self._observers:
            path = self._directory / name
            self._observers[name] = LeaseObserver(path, self._ttl_s, self._clock, calls=self._calls)
        view = self._observers[name].observe()
        self._views[name] = (now, view)
        return view

    def alive(self, name: str) -> bool:
        return self.view(name).alive
