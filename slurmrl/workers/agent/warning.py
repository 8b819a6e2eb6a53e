"""Signals that announce the end of the job, and their likely causes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

from slurmrl import env, log
from slurmrl.display.words import signal_name
from slurmrl.run.reports import Warned

logger = log.get(__name__)

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
LATE_S = 90.0
"""Slurm may send a warning up to a minute early; the rest allows for a busy host."""


class Warnings:
    """Handles the signals, from `listen` on.

    ``lead_s`` is how long before the time limit the scheduler was requested to warn, ``stopped``
    whether a user has asked the trial to stop.
    """

    def __init__(
        self,
        *,
        local: bool,
        lead_s: float,
        stopped: Callable[[], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._local = local
        self._lead_s = lead_s
        self._stopped = stopped
        self._clock = clock
        self._first: int | None = None
        self._told = False

    def listen(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the supervisor held them back

    @property
    def received(self) -> bool:
        return self._first is not None

    def take(self) -> Warned | None:
        """Return the first warning, once."""
        if self._first is None or self._told:
            return None
        self._told = True
        warned = self._judge(signal_name(self._first))
        logger.info("received %s (%s): this job will end soon", warned.signal, warned.cause)
        return warned

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._first is None:
            self._first = number

    def _judge(self, name: str) -> Warned:
        if self._local or self._stopped():
            return Warned(signal=name, cause="interrupt")
        end = env.JOB_END.get()
        if end is None:
            return Warned(signal=name, cause="unknown")
        left_s = end - self._clock()
        # Slurm warns of a time limit with USR2, and sends TERM when it is reached.
        lead_s = self._lead_s if name == "SIGUSR2" else 0.0
        cause = "time_limit" if left_s <= lead_s + LATE_S else "preemption"
        return Warned(signal=name, cause=cause, time_left_s=round(left_s, 1))
