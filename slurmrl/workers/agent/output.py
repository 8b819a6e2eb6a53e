"""Bounds what the output of a host's processes takes on disk.

Processes append to one file (O_APPEND) without asking anybody, so nothing here can slow or block
them, and their last words are on disk although the agent may be dead. The agent looks at the size
now and then. A file that is too long is copied, its newest part at least, beside itself and cut to
nothing; what is written between the last look at its end and the cut, microseconds, is lost.
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
from slurmrl.monitor import log_files
from slurmrl.paths import rotated

logger = log.get(__name__)

SHARE = 4
"""A file may take this part of what a task's output may take in all, and the part before it as
much; what is left is for earlier attempts and for stacks."""
SHORTEST_LOOK_S = 1.0


class Output:
    """The file that the present attempt of a task writes."""

    def __init__(
        self,
        path: Path,
        limit_bytes: int,
        look_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``limit_bytes``: for all files of the task; ``look_s``: longest time between looks."""
        self.path = path
        self._limit_bytes = limit_bytes
        self._look_s = look_s
        self._clock = clock
        self._looked_at = self._next_look = clock()
        self._size = 0
        self._part = 1

    def look(self) -> None:
        """Cut the file if it is time to look and it is too long."""
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
            logger.warning("cannot bound the output in %s, trying on: %s", self.path, error)
            size = self._size
        self._plan(now, size, most)

    def _plan(self, now: float, size: int, most: int) -> None:
        """The sooner the next look, the sooner the file would be full at this pace."""
        passed_s = max(now - self._looked_at, 1e-3)
        pace = (size - self._size) / passed_s
        full_s = (most - size) / pace / 2 if pace > 0 else self._look_s
        self._next_look = now + min(self._look_s, max(SHORTEST_LOOK_S, full_s))
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
                logger.warning("output is dropped: %s", error)
                atomic.remove(older)
            os.ftruncate(file, 0)
        self._part += 1
        atomic.append(self.path, log_files.head(self._part, 0))

    def prune(self) -> None:
        """Remove the oldest files of earlier attempts that are too much."""
        try:
            self._prune()
        except (OSError, EnvironmentFailure) as error:
            logger.warning("cannot remove old output beside %s: %s", self.path, error)

    def _prune(self) -> None:
        task = self.path.name.partition(".")[0]
        pattern = re.compile(rf"{task}\.(\d+)\..+")
        found = []
        for name in atomic.list_names(self.path.parent):
            match = pattern.fullmatch(name)
            if match and name not in (self.path.name, rotated(self.path).name):
                stat = REAL.stat(self.path.with_name(name))
                found.append((int(match[1]), stat.st_mtime, name, stat.st_size))
        left = sum(size for *_, size in found)
        for _, _, name, size in sorted(found):
            if left <= self._limit_bytes // 2:
                return
            atomic.remove(self.path.with_name(name))
            left -= size
