"""Links, the jobs of a trial: their turns, and the end of a trial or job in special cases.

This module decides whether a link has anything to do, ends a trial for a user error, and reads the
turns of links in the name store (see `supervisor.leader_lock`). It observes the first agent of a
job, and ends a job whose batch process was lost with its host.

Slurm ends such a job itself, unless the job has spares (``--no-kill``). The remaining processes end
a job with spares: agents that see the first agent's lease expire (`workers.agent.loss_detection`),
or watchers (`workers.supervisor.watcher`), which run even without agents.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from slurmrl import log
from slurmrl.backoff import Backoff, retry
from slurmrl.errors import (
    CorruptFileError,
    EnvironmentFailure,
    NameNotFoundError,
    SchedulerError,
    SlurmrlError,
    TrialEndedError,
)
from slurmrl.fsio import documents
from slurmrl.fsio.documents import TEXT, FieldType, one_of
from slurmrl.name_resolve.store import NameStore
from slurmrl.run import demand, keys
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import end, fold
from slurmrl.run.lease import LeaseObserver, LeaseView
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import TRAINERS, Identity
from slurmrl.scheduler.base import Continue
from slurmrl.scheduler.chain import TIMEOUT_S, Link, continues
from slurmrl.scheduler.client import SlurmClient, may_have_worked
from slurmrl.scheduler.states import QueueRow
from slurmrl.watch import published
from slurmrl.watch.snapshot import newest_submission

logger = log.get(__name__)
ASK_S = (2.0, 60.0)
"""First and longest pause between attempts to end the job."""
ASKED = 30
"""Number of attempts to end the job, which take more than 20 minutes."""
REFUSALS = 3
"""Number of rejected requeues of a running job after which it is cancelled."""
_START = FieldType(
    "JOBID.RESTARTCOUNT",
    lambda value: isinstance(value, str) and re.fullmatch(r"\d{1,12}\.\d{1,9}", value) is not None,
)
_ELEMENT = FieldType(
    "JOBID_INDEX",
    lambda value: isinstance(value, str) and re.fullmatch(r"\d{1,12}_\d{1,9}", value) is not None,
)


def reason_to_leave(paths: RunPaths, submission: int) -> str | None:
    """Return why this job has nothing to do (an ended trial, a newer submission, a stop), or None.

    Wait while the directory does not answer. If links failed instead, they would use up the chain.
    """
    return retry("read the history", lambda: _reason(paths, submission))


def end_as_failed(paths: RunPaths, submission: int, reason: str) -> None:
    """End the trial because of a user error that would occur in every job and on every host.

    The error occurred before an incarnation could report it. If the trial has already ended, or a
    newer submission has taken it over, nothing changes.

    Call it only from the job that holds the trial: another job may be running it.
    """
    if reason_to_leave(paths, submission) is not None:
        return
    try:
        data = {"reason": reason, "traceback": ""}
        retry("end the trial", lambda: end(History(paths.history), Kind.FAILED, data))
        logger.error("the trial has failed: %s", reason)
    except TrialEndedError as error:
        logger.info("%s", error)


def _reason(paths: RunPaths, submission: int) -> str | None:
    end = fold(History(paths.history).read()).end
    if end is not None:
        return f"the trial has ended ({end.kind})"
    newest = newest_submission(paths)
    if newest is not None and newest.number > submission:
        return f"submission {submission} was superseded by a newer one"
    if by := demand.stop_requested_by(paths, submission):
        return f"submission {submission} was stopped by {by}"
    return None


def requeue(link: Link, sleep: Callable[[float], None] = time.sleep) -> None:
    """Requeue the job of a link instead of its batch process, or cancel it if no link follows.

    Nothing else would end the job before its time limit. So this tries again if the controller does
    not answer, and cancels the job if Slurm refuses to requeue it.
    """
    client = SlurmClient(TIMEOUT_S)
    leave = client.requeue if _is_requeued(link) else _cancel(client)
    backoff, refusals = Backoff(*ASK_S, sleep=sleep), 0
    for number in range(ASKED):
        if number and not _holds_hosts(client, link):
            return
        try:
            leave(link.element)
            return
        except SchedulerError as error:
            logger.warning("cannot end the job: %s", error)
            refusals += not may_have_worked(error)
            if refusals == REFUSALS:
                leave = _cancel(client)
        backoff.sleep()


def this_start(client: SlurmClient, link: Link) -> QueueRow | None:
    """Return Slurm's queue row for the current start of a link. Raises SchedulerError.

    Return None if Slurm has forgotten this start, or has requeued the link after it.
    """
    row = client.row_of(link.element)
    return row if row is not None and row.restarts == link.restart else None


def _is_requeued(link: Link) -> bool:
    try:
        return continues(link) is not Continue.NONE
    except SlurmrlError as error:
        logger.warning("cannot read how the trial continues: %s", error)
        return True


def _cancel(client: SlurmClient) -> Callable[[str], None]:
    return lambda element: client.cancel([element])


def _holds_hosts(client: SlurmClient, link: Link) -> bool:
    """Return whether, according to Slurm, the job runs and was not requeued since."""
    try:
        row = this_start(client, link)
    except SchedulerError as error:
        logger.warning("cannot ask about the job: %s", error)
        return True
    return row is not None and row.raw == "RUNNING"


class FirstAgent:
    """The trainers' first agent, which is alive while it renews its lease, by this process's clock.

    It is the newest agent that has claimed this task in a round or a start of a job.
    """

    def __init__(
        self,
        paths: RunPaths,
        names: NameStore,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Observe the first attempt of the trial until `find` has found another one."""
        self._paths, self._names = paths, names
        self._ttl_s, self._clock = ttl_s, clock
        self.claim: Identity | None = None
        self._lease = self.lease(0)

    @property
    def attempt(self) -> int:
        return 0 if self.claim is None else self.claim.attempt

    def lease(self, attempt: int) -> LeaseObserver:
        """Return a new observer of the lease of an attempt."""
        lease = self._paths.lease(TRAINERS, 0, attempt)
        return LeaseObserver(lease, self._ttl_s, self._clock)

    def find(self, job: str) -> Identity | None:
        """Return the newest claim in ``job``, and observe it from now on; None without a claim.

        ``job`` is ``JOBID.RESTART.ROUND`` or ``JOBID.RESTART``. Raises EnvironmentFailure.
        """
        claim = published.newest_claim(self._names, TRAINERS, 0, job)
        if claim is not None and claim != self.claim:
            self.claim, self._lease = claim, self.lease(claim.attempt)
        return claim

    def try_to_find(self, job: str) -> Identity | None:
        """Call `find`, but return None while the directory does not answer."""
        try:
            return self.find(job)
        except EnvironmentFailure as error:
            logger.info("cannot look for the first agent, will retry: %s", error)
            return None

    def observe(self) -> LeaseView:
        return self._lease.observe()


class Left(StrEnum):
    """The way in which the previous job left the trial."""

    ENDED = "ended"
    PUT_BACK = "put back"
    """Slurm has requeued the job, or ended it with its host; the job is not the cause."""
    UNKNOWN = "unknown"


_FIELDS = {
    "start": _START,
    "element": _ELEMENT,
    "host": TEXT,
    "before": TEXT,
    "left": one_of(*Left),
}


@dataclass(frozen=True)
class Turn:
    """The time in which one job has the trial."""

    start: str
    """``JOBID.RESTARTCOUNT``."""
    element: str
    """``41_3``."""
    host: str
    """Host of its batch process."""
    before: str = ""
    """The previous start."""
    left: Left = Left.UNKNOWN

    @property
    def job(self) -> str:
        return self.start.partition(".")[0]

    @property
    def restarts(self) -> int:
        return int(self.start.partition(".")[2])


def read_turn(names: NameStore, number: int) -> Turn | None:
    """Return the turn with a number; None if there is none. Raises CorruptFileError."""
    key = keys.leader_lock(number)
    try:
        values = documents.parse(names.get(key), f"the name {key}", _FIELDS, _FIELDS)
    except NameNotFoundError:
        return None
    left = Left(values["left"])
    return Turn(values["start"], values["element"], values["host"], values["before"], left)


def read_intact_turn(names: NameStore, number: int) -> Turn | None:
    """Read a turn. A damaged turn counts as missing, so that it cannot block every job."""
    try:
        return read_turn(names, number)
    except CorruptFileError as error:
        logger.warning("%s", error)
        return None


def starts_put_back(names: NameStore) -> frozenset[str]:
    """Return the starts of jobs that Slurm took away from the trial."""
    taken = names.find_subtree(keys.leader_locks())
    numbers = [int(tail) for key in taken if (tail := key.rpartition("/")[2]).isdecimal()]
    turns = [turn for number in numbers if (turn := read_intact_turn(names, number)) is not None]
    return frozenset(turn.before for turn in turns if turn.left is Left.PUT_BACK)
