"""Signs of life over a pipe, and detection of processes that stop sending them.

A process sends none while it is stopped or something holds its interpreter lock. One that waits for
other ranks does send them; the master's deadline covers those.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from slurmrl.run.channel.pipe import Connection
from slurmrl.workers.messages import FROM_WORKER, Pulse

K = TypeVar("K", bound=Hashable)

CHUNK_BYTES = 4096
PULSES_PER_SILENCE = 4
GAPS_PER_SILENCE = 4
"""The time between two checks counts as at most this fraction of the silence limit: a watcher that
did not run itself could not hear anything."""


def interval_s(heartbeat_s: float, silence_s: float) -> float:
    """Return the interval between two pulses: several must be missing before silence counts."""
    return min(heartbeat_s, silence_s / PULSES_PER_SILENCE)


@dataclass(frozen=True)
class Errand:
    """A second task of the pulse thread: call ``run`` whenever ``wakeup`` is readable."""

    wakeup: int
    run: Callable[[], None]


def start(
    pipe: Connection,
    every_s: float,
    describe: Callable[[], Pulse] = Pulse,
    errand: Errand | None = None,
) -> None:
    """Send a pulse at once and then every ``every_s`` seconds, from a thread.

    The thread ends with the process or the pipe. It sends no pulse while earlier messages are
    unread: those are signs of life too.
    """

    def beat() -> None:
        while not pipe.closed:
            if pipe.flush():
                pipe.send(FROM_WORKER.to_json(describe()))
            if errand is None:
                time.sleep(every_s)
            elif select.select([errand.wakeup], [], [], every_s)[0]:
                os.read(errand.wakeup, CHUNK_BYTES)
                errand.run()

    threading.Thread(target=beat, name="pulse", daemon=True).start()


class Watch(Generic[K]):
    """Tracks how long each of several processes has been silent.

    The time before its first sign of life does not count.
    """

    def __init__(self, silence_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._silence_s = silence_s
        self._clock = clock
        self._looked_at = clock()
        self._ages: dict[K, float] = {}

    def heard(self, key: K) -> None:
        self._ages[key] = 0.0

    def forget(self, key: K) -> None:
        self._ages.pop(key, None)

    def silent(self) -> list[K]:
        """Return the keys of those that have been silent for too long."""
        now = self._clock()
        passed_s = min(now - self._looked_at, self._silence_s / GAPS_PER_SILENCE)
        self._looked_at = now
        for key in self._ages:
            self._ages[key] += passed_s
        return [key for key, age_s in self._ages.items() if age_s >= self._silence_s]
