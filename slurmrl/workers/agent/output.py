"""Rotation of the output of a host's processes, which bounds its size on disk.

Processes append to one file directly (O_APPEND), so rotation cannot slow or block them, and their
last lines are on disk even if the agent is dead. The agent checks the size periodically. It copies
the newest part of a file that is too long to ``.1`` and truncates the file. Output that is written
between the last read and the truncation, within microseconds, is lost.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from slurmrl import log
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL
from slurmrl.fsio.primitives import opened
from slurmrl.run.paths import rotated
from slurmrl.watch import log_files

logger = log.get(__name__)

SHARE = 4
"""A file may take 1/SHARE of the limit of its task, and the part before it as much. The rest is for
earlier attempts and for stacks."""
SHORTEST_LOOK_S = 1.0
NEWEST_BYTES = 256 * 1024


class Output:
    """The output file of the current attempt at a task."""

    def __init__(
        self,
        path: Path,
        limit_bytes: int,
        look_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``limit_bytes``: of all files of the task; ``look_s``: longest time between checks."""
        self.path = path
        self._limit_bytes = limit_bytes
        self._look_s = look_s
        self._clock = clock
        self._looked_at = self._next_look = clock()
        self._size = 0
        self._part = 1

    def look(self) -> None:
        """Rotate the file if a check is due and the file is too long."""
        now = self._clock()
        if now < self._next_look:
            return
        most = self._limit_bytes // SHARE
        try:
            size = REAL.stat(self.path).st_size
            if size > most:
                self._rotate(most)
                self._prune()
                size = 0
        except FileNotFoundError:
            size = 0
        except (OSError, EnvironmentFailure) as error:
            logger.warning("cannot rotate the output in %s, will retry: %s", self.path, error)
            size = self._size
        self._plan(now, size, most)

    def newest_after_now(self) -> Callable[[], str]:
        """Return a function that reads the newest output written after this call, at most
        NEWEST_BYTES of it; empty if it cannot be read."""
        begin = self.path.stat().st_size if self.path.exists() else 0

        def newest() -> str:
            try:
                with opened(self.path, os.O_RDONLY | os.O_NOFOLLOW, REAL) as file:
                    size = os.fstat(file).st_size
                    start = max(begin if begin <= size else 0, size - NEWEST_BYTES)
                    return os.pread(file, NEWEST_BYTES, start).decode(errors="replace")
            except OSError:
                return ""

        return newest

    def _plan(self, now: float, size: int, most: int) -> None:
        """Schedule the next check: the faster the file grows, the sooner."""
        passed_s = max(now - self._looked_at, 1e-3)
        bytes_per_s = (size - self._size) / passed_s
        half_full_s = (most - size) / bytes_per_s / 2 if bytes_per_s > 0 else self._look_s
        self._next_look = now + min(self._look_s, max(SHORTEST_LOOK_S, half_full_s))
        self._looked_at, self._size = now, size

    def _rotate(self, most: int) -> None:
        older = rotated(self.path)
        with opened(self.path, os.O_RDWR | os.O_NOFOLLOW, REAL) as file:
            size = os.fstat(file).st_size
            skipped = max(size - most, 0)
            data = os.pread(file, most, skipped)
            head = log_files.head(self._part, skipped) if skipped else b""
            try:
                atomic.replace(older, head + data, durable=False)
                atomic.append(older, os.pread(file, most, skipped + len(data)))
            except EnvironmentFailure as error:
                logger.warning("cannot keep the earlier part of %s: %s", self.path, error)
                atomic.remove(older)
            os.ftruncate(file, 0)
        self._part += 1
        atomic.append(self.path, log_files.head(self._part, 0))

    def prune(self) -> None:
        """Remove the oldest files of earlier attempts until the others are within the limit."""
        try:
            self._prune()
        except FileNotFoundError:
            return  # the first attempt: there is no directory yet
        except (OSError, EnvironmentFailure) as error:
            logger.warning("cannot remove old output beside %s: %s", self.path, error)

    def _prune(self) -> None:
        task = self.path.name.partition(".")[0]
        pattern = re.compile(rf"{task}\.(\d+)\..+")
        files = []
        for name in atomic.list_names(self.path.parent):
            match = pattern.fullmatch(name)
            if match and name not in (self.path.name, rotated(self.path).name):
                stat = REAL.stat(self.path.with_name(name))
                files.append((int(match[1]), stat.st_mtime, name, stat.st_size))
        total = sum(size for *_, size in files)
        for _, _, name, size in sorted(files):
            if total <= self._limit_bytes // 2:
                return
            atomic.remove(self.path.with_name(name))
            total -= size
