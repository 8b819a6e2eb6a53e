"""Follow growing logs, by kernel notification where available and by polling elsewhere."""

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
"""A poll is late by at most a tenth of the time waited, until pauses reach their maximum."""


class Follower:
    """The logs of several writers in one directory.

    ``longest_poll_s`` bounds the pauses between polls where the kernel does not report changes.
    While the directory does not answer, logs appear to have no news; see `answers`.
    """

    def __init__(
        self, readers: Sequence[LogReader], directory: Path, *, longest_poll_s: float
    ) -> None:
        self.answers = True
        """Whether the last read of all logs succeeded."""
        self._readers = list(readers)
        self._wakeup = Wakeup(directory)
        self._backoff = Backoff(FIRST_POLL_S, longest_poll_s, growth=POLL_GROWTH)
        self.woken = False
        """Whether a change was reported since the last read."""
        self._told = False
        """Whether the kernel reports every change since the last read."""
        self._moved = False
        """Whether a log moved on to a new file, which is not watched yet."""

    def read(self) -> list[Message]:
        """Return the new messages of all logs. Raises CorruptFileError."""
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
        """A descriptor that is readable when there may be news; -1 without notification."""
        return self._wakeup.fileno()

    def drain(self) -> None:
        """Acknowledge that `fileno` is readable; it becomes readable again at the next change."""
        self.woken = True
        self._wakeup.drain()

    def pause_s(self) -> float:
        """Return the longest wait before the next `read`, including waits for `fileno`."""
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
            logger.warning("%s; will retry", error)
            self.answers = False
            return []
