"""Followers of growing logs.

On a local file system, inotify reports changes. Elsewhere, or if the kernel has no watches left,
followers poll the logs, and writers announce messages by wake-ups. Notifications and wake-ups are
only hints, so followers also poll occasionally with inotify.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from slurmrl import log
from slurmrl.backoff import Backoff
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio.calls import is_local
from slurmrl.run.channel.message_log import LogReader, Message
from slurmrl.run.channel.wakeups import Source, WakeupSocket

logger = log.get(__name__)

FIRST_POLL_S = 0.001
ANNOUNCED_FIRST_POLL_S = 1.0
"""First pause in seconds between polls of logs whose writers send wake-ups. If a wake-up is lost,
its message is late by at most this pause or a tenth of the wait, whichever is longer."""
POLL_GROWTH = 1.1
"""Factor between pauses. Until pauses reach their maximum, a poll is late by at most a tenth of the
wait."""
SPARE_LOOKS = 8
"""Maximum number of reads without new messages that a log's wake-ups may cause. Each poll without
new messages allows another such read. Useless wake-ups therefore at most double the reads."""
SAFETY_S = 1.0
"""Maximum pause in seconds between polls while the kernel reports every change."""
_EVENT_BYTES = 65536
_IN_MODIFY = 0x2
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # These are the values of IN_NONBLOCK and IN_CLOEXEC.


class _Polls:
    """Schedule for polling several logs. Pauses grow from ``first_s`` to ``longest_s``."""

    def __init__(self, first_s: float, longest_s: float, clock: Callable[[], float]) -> None:
        self._backoff = Backoff(min(first_s, longest_s), longest_s, growth=POLL_GROWTH)
        self._clock = clock
        self.next_at = clock()
        self.logs = 0
        """Number of logs with this schedule."""

    @property
    def due(self) -> bool:
        return self._clock() >= self.next_at

    def polled(self) -> None:
        self.next_at = self._clock() + self._backoff.next_s()

    def restart(self) -> None:
        """Continue with the shortest pause. Do not postpone the next poll."""
        self._backoff.reset()
        self.next_at = min(self.next_at, self._clock() + self._backoff.next_s())


class _Followed:
    """A log, the schedule of its polls, and the number of reads that wake-ups may still cause."""

    def __init__(self, reader: LogReader, polls: _Polls) -> None:
        self.reader = reader
        self.polls = polls
        polls.logs += 1
        self.spare = SPARE_LOOKS
        self.answers = True

    def poll_by(self, polls: _Polls) -> None:
        self.polls.logs -= 1
        polls.logs += 1
        self.polls = polls

    def read(self) -> list[Message]:
        try:
            found = self.reader.read()
            self.answers = True
            return found
        except EnvironmentFailure as error:
            logger.warning("%s; will retry", error)
            self.answers = False
            return []


class Follower:
    """The logs of several writers in one directory.

    ``longest_poll_s`` is the maximum pause in seconds between polls if the kernel does not report
    changes. Without reports of the kernel, writers send wake-ups to ``wakeups``. If a wake-up
    announced a log's newest messages, the log is at first polled less often than other logs. While
    the directory does not answer, logs appear to have no new messages; see `answers`.
    """

    def __init__(
        self,
        readers: Sequence[LogReader],
        directory: Path,
        *,
        longest_poll_s: float,
        wakeups: WakeupSocket | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.woken = False
        """Whether a change was reported since the last read."""
        self._silent = _Polls(FIRST_POLL_S, longest_poll_s, clock)
        self._announcing = _Polls(ANNOUNCED_FIRST_POLL_S, longest_poll_s, clock)
        self._logs = [_Followed(reader, self._silent) for reader in readers]
        self._watch = FileWatch(directory)
        self._wakeups = wakeups
        self._sources: dict[Source, _Followed] = {}
        """Mapping from the address of a writer's wake-ups to the writer's log."""
        self._announced: set[_Followed] = set()
        """Logs whose writers have sent a wake-up since their last read."""
        self._clock = clock
        self._next_at = clock()
        """Time of the next read if no change is reported."""

    def listen_for(self, source: Source, number: int) -> None:
        """Treat wake-ups from ``source`` as reports of changes of the ``number``-th log."""
        self._sources[source] = self._logs[number]

    @property
    def answers(self) -> bool:
        """Whether the last read of each log succeeded."""
        return all(one.answers for one in self._logs)

    def read(self) -> list[Message]:
        """Return the new messages of all logs. Raises CorruptFileError."""
        return self._look(self._logs, (self._silent, self._announcing))

    def read_due(self) -> list[Message]:
        """Return the new messages of the logs whose writers sent a wake-up or whose poll is due.

        If the kernel reports changes, return the new messages of all logs. Raises CorruptFileError.
        """
        if self._watch.fileno() >= 0:
            return self.read()
        self.drain()
        due = [polls for polls in (self._silent, self._announcing) if polls.due]
        logs = list(self._announced)
        if due:
            logs = [one for one in self._logs if one in self._announced or one.polls in due]
        return self._look(logs, due) if logs else []

    def fileno(self) -> int:
        """Return a descriptor that is readable on possible messages; -1 without notification."""
        descriptor = self._watch.fileno()
        return self._wakeups.fileno() if self._wakeups and descriptor < 0 else descriptor

    def drain(self) -> None:
        """Acknowledge that `fileno` is readable, so that it becomes readable at the next change."""
        if self._watch.fileno() >= 0:
            self.woken = True
            self._watch.drain()
        elif self._wakeups is not None:
            self._receive(self._wakeups)

    def expect_news(self) -> None:
        """Restart with short pauses for logs without wake-ups, because new messages are likely."""
        if self._watch.fileno() < 0:
            self._silent.restart()
            self._next_at = self._next_poll_at()

    def pause_s(self) -> float:
        """Return the longest wait before the next `read_due`, including waits for `fileno`."""
        return max(self._next_at - self._clock(), 0.0)

    def wait(self, also: Collection[int] = (), most_s: float = math.inf) -> None:
        """Wait until a message or a descriptor in ``also`` may be read, at most ``most_s``."""
        until = self._clock() + most_s
        while not self.woken and (left_s := min(self.pause_s(), until - self._clock())) > 0:
            descriptors = [one for one in (self.fileno(), *also) if one >= 0]
            if not descriptors:
                time.sleep(left_s)
                return
            poller = select.poll()
            for descriptor in descriptors:
                poller.register(descriptor, select.POLLIN)
            readable = {descriptor for descriptor, _ in poller.poll(left_s * 1000)}
            if self.fileno() in readable:
                self.drain()
            if not readable.isdisjoint(also):
                return

    def close(self) -> None:
        self._watch.close()

    def _receive(self, wakeups: WakeupSocket) -> None:
        received = wakeups.receive()
        heard = [self._sources[source] for source in received.sources if source in self._sources]
        if received.overflowed:  # The dropped wake-ups may be from any writer.
            heard += self._sources.values()
        self._announced.update(one for one in heard if one.spare > 0)
        self.woken = bool(self._announced)

    def _look(self, logs: Sequence[_Followed], due: Collection[_Polls]) -> list[Message]:
        """Read ``logs``, and record a poll for each schedule in ``due``."""
        self.woken = False
        paths = [one.reader.path for one in logs]
        told = self._watch.follow(paths)
        news: list[Message] = []
        for one in logs:
            found = one.read()
            self._account(one, news=bool(found), polled=one.polls in due)
            news += found
        # If a log continues in another segment, watch the new file.
        moved = paths != [one.reader.path for one in logs]
        for polls in due:
            polls.polled()
        if news:
            self._silent.restart()
            self._announcing.restart()
        now = self._clock()
        if told and self.answers:
            self._next_at = now if moved else now + SAFETY_S
        else:
            self._next_at = self._next_poll_at()
        return news

    def _next_poll_at(self) -> float:
        return min(polls.next_at for polls in (self._silent, self._announcing) if polls.logs)

    def _account(self, one: _Followed, *, news: bool, polled: bool) -> None:
        announced = one in self._announced
        self._announced.discard(one)
        if news:
            one.poll_by(self._announcing if announced else self._silent)
            one.spare = SPARE_LOOKS
        elif polled:
            one.spare = min(one.spare + 1, SPARE_LOOKS)
        else:
            one.spare -= 1


class FileWatch:
    """Notification of writes to followed files in one directory."""

    def __init__(self, directory: Path) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._library.inotify_init1(_FLAGS) if is_local(directory) else -1
        self._followed: set[Path] = set()

    def fileno(self) -> int:
        """Return a descriptor that is readable when a file has changed since the last `drain`.

        Return -1 if notification is not available.
        """
        return int(self._descriptor)

    def follow(self, paths: Iterable[Path]) -> bool:
        """Follow the files that exist; return whether all files are followed now.

        Only changes after the return are reported. Therefore first follow, then read, then wait.
        """
        if self._descriptor < 0:
            return False
        for path in paths:
            if path not in self._followed:
                watch = self._library.inotify_add_watch(
                    self._descriptor, os.fsencode(path), _IN_MODIFY
                )
                if watch < 0:
                    return False
                self._followed.add(path)
        return True

    def drain(self) -> None:
        """Discard the changes reported so far. The caller reads the files next."""
        if self._descriptor < 0:
            return
        try:
            while os.read(self._descriptor, _EVENT_BYTES):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
