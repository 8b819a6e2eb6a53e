"""Reading logs as they grow: told of changes where the kernel can tell, else by polling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slurmrl import log
from slurmrl.backoff import Backoff
from slurmrl.channel.frame import Message
from slurmrl.channel.log import LogReader
from slurmrl.channel.wakeup import SAFETY_S, Wakeup
from slurmrl.errors import EnvironmentFailure

logger = log.get(__name__)

FIRST_POLL_S = 0.001
POLL_GROWTH = 1.1
"""A poll comes late by at most a tenth of the time waited, until pauses are as long as they get."""


class Follower:
    """The logs of several writers in one directory.

    ``longest_poll_s`` bounds the pauses where nothing tells of changes. A directory that does not
    answer looks like logs with nothing new in them, see `answers`.
    """

    def __init__(
        self, readers: Sequence[LogReader], directory: Path, *, longest_poll_s: float
    ) -> None:
        self.answers = True
        """Whether all logs could be read the last time."""
        self._readers = list(readers)
        self._wakeup = Wakeup(directory)
        self._backoff = Backoff(FIRST_POLL_S, longest_poll_s, growth=POLL_GROWTH)
        self.woken = False
        """Whether a change was told since the last read."""
        self._told = False
        """Whether every change since the last read will be told."""
        self._moved = False
        """Whether some log went on in another file, which nothing tells about yet."""

    def read(self) -> list[Message]:
        """What is new in all logs. Raises CorruptFileError."""
        self.woken = False
        paths = [reader.path for reader in self._readers]
        self._told = self._wakeup.follow(paths)
        self.answers = True
        news = [message for reader in self._readers for message in self._read(reader)]
        self._moved = paths != [reader.path for reader in self._readers]
        if news:
            self._backoff.reset()
        return news

    def fileno(self) -> int:
        """Readable when there may be news, -1 if nothing tells."""
        return self._wakeup.fileno()

    def drain(self) -> None:
        """Take note that `fileno` is readable; it waits for changes from now on."""
        self.woken = True
        self._wakeup.drain()

    def pause_s(self) -> float:
        """How long to wait at most, also for `fileno`, before the next `read`."""
        if self._moved:
            return 0.0
        return SAFETY_S if self._told and self.answers else self._backoff.next_s()

    def wait(self) -> None:
        """Wait until there may be news."""
        self._wakeup.wait(self.pause_s())

    def close(self) -> None:
        self._wakeup.close()

    def _read(self, reader: LogReader) -> list[Message]:
        try:
            return reader.read()
        except EnvironmentFailure as error:
            logger.warning("trying on: %s", error)
            self.answers = False
            return []
