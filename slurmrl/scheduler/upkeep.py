"""Background upkeep by the batch process: top-up of the chain, and the tasks of elastic groups.

Where Slurm's commands do not work on this host, only the jobs queued at first remain.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping

from slurmrl import log
from slurmrl.errors import CorruptFileError, EnvironmentFailure, SlurmrlError, UsageError
from slurmrl.run import orphaned, scale
from slurmrl.scheduler import stopping, succession
from slurmrl.scheduler.chain import TopUp, committed, top_up
from slurmrl.scheduler.elastic import Change, ElasticGroup
from slurmrl.scheduler.succession import TIMEOUT_S, Link, keep_off

logger = log.get(__name__)

TRIES = 3
RETRY_S = 120.0
"""Seconds between tries of a failed sbatch; the controller may have been down."""
COMMIT_S = 15.0
"""Seconds between two checks for the first commit."""
KEEP_S = 60.0
"""Seconds between two checks of an elastic group; doubled with each failure in a row."""
LONGEST_S = 3600.0


class Upkeep:
    """Runs in threads of its own, since a link must not wait for Slurm. Signals stay with the
    caller's threads."""

    def __init__(self, link: Link, elastic: Mapping[str, int], told: Callable[[str], None]) -> None:
        """``elastic``: group -> planned number of tasks; ``told`` is called with the id of each
        array added to the chain."""
        self._link = link
        self._told = told
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._keep_chain, name="top-up", daemon=True)]
        self._threads += [
            threading.Thread(target=self._keep_group, args=group, name=group[0], daemon=True)
            for group in elastic.items()
        ]

    def start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            for thread in self._threads:
                thread.start()  # with every signal blocked
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def stop(self) -> bool:
        """Stop and return whether no submission is in progress. Wait until a hanging command has
        timed out; a thread that still runs then is between several commands."""
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        return not any(thread.is_alive() for thread in self._threads)

    def _keep_chain(self) -> None:
        try:
            keep_off(self._link)
        except (EnvironmentFailure, CorruptFileError, UsageError) as error:
            logger.info("the queued links are unchanged: %s", error)
        failures = 0
        while failures < TRIES and not self._stop.is_set():
            try:
                outcome = top_up(self._link, succession.slurm(), by=self._link.element)
            except (EnvironmentFailure, UsageError) as error:
                failures += 1
                logger.info("the chain was not extended: %s", error)
                self._stop.wait(RETRY_S)
                continue
            except SlurmrlError as error:
                logger.warning("the chain cannot be extended: %s", error)
                return
            if isinstance(outcome, str):
                logger.info("the chain was extended: job %s", outcome)
                self._told(outcome)
            if outcome is not TopUp.NO_COMMIT or not self._wait_for_commit():
                return

    def _wait_for_commit(self) -> bool:
        """Wait for a commit; return False if the link ends before it."""
        while not self._stop.wait(COMMIT_S):
            try:
                if committed(self._link):
                    return True
            except EnvironmentFailure as error:
                logger.info("cannot check for a commit: %s", error)
        return False

    def _unless_stopped(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise UsageError("the link ends")

    def _keep_group(self, name: str, planned: int) -> None:
        link = self._link
        group = ElasticGroup(
            link.run, link.submission, name, by=link.element, sleep=self._unless_stopped
        )
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            try:
                if stopping.requested_by(link.run, link.submission):
                    return
                orphaned.remove(link.run, name)  # the trainers are here
                change = group.keep(scale.wanted(link.run, name, planned))
            except SlurmrlError as error:
                logger.info("group %s is unchanged: %s", name, error)
                pause_s = min(max(2 * pause_s, KEEP_S), LONGEST_S)
            else:
                pause_s = KEEP_S
                if change != Change():
                    logger.info("group %s: %s", name, change)
