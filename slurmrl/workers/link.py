"""Links (the jobs of a trial): the leader lock, and how a trial or job ends in special cases.

This module decides whether a link has work to do, and ends a trial after a user error. It also
requeues a job whose batch process was lost with its host. Slurm ends such a job itself unless the
job has spares (``--no-kill``). In a job with spares, agents requeue the job when the lease of the
first agent expires (`workers.agent.loss_detection`). Watchers (`workers.supervisor.watcher`)
requeue the job if no agent is left.

The leader lock decides which of several running jobs continues a trial. Several jobs can run at the
same time if a user lifted an array's throttle or submitted a batch script by hand, or if Slurm
started a link while another link has lost a host. To take the lock, a job adds the next number to
the name store. Only one job can add a number. The job with the highest number holds the lock as
long as Slurm reports that this start of the job runs. If Slurm does not answer, the lease of the
job's first agent decides. A job without the lock neither trains nor uses up its link.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from slurmrl import log
from slurmrl.backoff import Backoff, retry
from slurmrl.errors import (
    CorruptFileError,
    EnvironmentFailure,
    NameExistsError,
    NameNotFoundError,
    SchedulerError,
    SlurmrlError,
    TrialEndedError,
)
from slurmrl.fsio import documents
from slurmrl.fsio.documents import FieldType, one_of
from slurmrl.name_resolve.store import NameStore
from slurmrl.run import events, keys
from slurmrl.run.events import EventWriter
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import end, fold
from slurmrl.run.lease import GAPS_PER_TTL, LeaseObserver, LeaseView
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import TRAINERS, Identity
from slurmrl.scheduler.base import Continue
from slurmrl.scheduler.chain import TIMEOUT_S, Link, continues
from slurmrl.scheduler.client import SlurmClient, may_have_worked
from slurmrl.scheduler.slurm import SlurmScheduler
from slurmrl.scheduler.states import QueueRow
from slurmrl.scheduler.submission import is_another, newest_submission, stop_requested_by
from slurmrl.watch import published

logger = log.get(__name__)
ASK_S = (2.0, 60.0)
"""Minimum and maximum seconds between attempts to end the job."""
ASKED = 30
"""Number of attempts to end the job. Together, they take more than 20 minutes."""
REJECTIONS = 3
"""Number of rejected requeues after which the job is cancelled instead."""
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

    Wait while the directory does not answer. Otherwise failing links would use up the chain.
    """
    return retry("read the history", lambda: _reason(paths, submission))


def end_as_failed(paths: RunPaths, submission: int, reason: str) -> None:
    """End the trial because of a user error that every job would repeat on every host.

    Use this for errors before an incarnation has begun. Do nothing if the trial has already ended
    or a newer submission has taken over. Only the job that holds the leader lock may call this.
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
        return f"a newer submission has superseded submission {submission}"
    if by := stop_requested_by(paths, submission):
        return f"submission {submission} was stopped by {by}"
    return None


def requeue(link: Link, sleep: Callable[[float], None] = time.sleep) -> None:
    """Requeue the job of a link on behalf of its lost batch process; cancel it if no link follows.

    Repeat the request if the controller does not answer, and cancel the job if Slurm rejects the
    requeue. Otherwise, the job would occupy its hosts until its time limit.
    """
    client = SlurmClient(TIMEOUT_S)
    leave = client.requeue if _is_requeued(link) else _cancel(client)
    backoff, rejections = Backoff(*ASK_S, sleep=sleep), 0
    for number in range(ASKED):
        if number and not _holds_hosts(client, link):
            return
        try:
            leave(link.element)
            return
        except SchedulerError as error:
            logger.warning("cannot end the job: %s", error)
            rejections += not may_have_worked(error)
            if rejections == REJECTIONS:
                leave = _cancel(client)
        backoff.sleep()


def this_start(client: SlurmClient, link: Link) -> QueueRow | None:
    """Return Slurm's queue row for the current start of a link. Raises SchedulerError.

    Return None if Slurm no longer knows the job or has requeued it after this start.
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
    """Return whether Slurm still reports this start of the job as running, or does not answer."""
    try:
        row = this_start(client, link)
    except SchedulerError as error:
        logger.warning("cannot ask about the job: %s", error)
        return True
    return row is not None and row.raw == "RUNNING"


class FirstAgent:
    """Observer of the trainers' first agent: the newest agent that has claimed task 0.

    The agent counts as alive while it renews its lease, by this process's clock.
    """

    def __init__(
        self,
        paths: RunPaths,
        names: NameStore,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Observe the first attempt of the trial until `find` finds a newer attempt."""
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
        """Return the newest claim in ``job`` and observe its lease from now on.

        Return None without a claim. ``job`` is ``JOBID.RESTART.ROUND`` or ``JOBID.RESTART``. Raises
        EnvironmentFailure.
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
    """Slurm has requeued the job or taken its host away, so the job did not fail by itself."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Turn:
    """Period during which one job holds the leader lock."""

    start: Annotated[str, _START]
    """``JOBID.RESTARTCOUNT``."""
    element: Annotated[str, _ELEMENT]
    """``JOBID_INDEX``."""
    host: str
    """Host of the job's batch process."""
    before: str
    """The previous holder as ``JOBID.RESTARTCOUNT``; empty for the first holder."""
    left: Annotated[str, one_of(*Left)]
    """The way in which the previous holder left the trial (`Left`)."""
    run: str = ""
    """Run directory of the job. A copied run directory also contains records of the original."""

    @property
    def job(self) -> str:
        return self.start.partition(".")[0]

    @property
    def restarts(self) -> int:
        return int(self.start.partition(".")[2])


def read_turn(names: NameStore, number: int) -> Turn | None:
    """Return the turn with a number; None if there is none. Raises CorruptFileError."""
    key = keys.leader_lock(number)
    where = f"the name {key}"
    try:
        return documents.from_json(Turn, documents.parse(names.get(key), where), where)
    except NameNotFoundError:
        return None


def read_intact_turn(names: NameStore, number: int) -> Turn | None:
    """Return a turn, or None if it is missing or damaged. Damage must not block every job."""
    try:
        return read_turn(names, number)
    except CorruptFileError as error:
        logger.warning("%s", error)
        return None


def starts_put_back(names: NameStore) -> frozenset[str]:
    """Return the starts of jobs that Slurm requeued or ended with their host."""
    taken = names.find_subtree(keys.leader_locks())
    numbers = [int(tail) for key in taken if (tail := key.rpartition("/")[2]).isdecimal()]
    turns = [turn for number in numbers if (turn := read_intact_turn(names, number)) is not None]
    return frozenset(turn.before for turn in turns if turn.left == Left.PUT_BACK)


LOOK_S = 15.0
LONGEST_WAIT_S = 300.0
"""Maximum wait for the lock before a job is requeued."""
ENDS_S = 60.0
"""Seconds that Slurm may take to end a job after its requeue."""


class LeaderLock:
    """Leader lock of a trial, for one job."""

    def __init__(
        self,
        paths: RunPaths,
        names: NameStore,
        link: Link,
        start: str,
        host: str,
        scheduler: SlurmScheduler,
        *,
        lease_ttl_s: float,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._paths, self._names, self._link = paths, names, link
        self._mine = Turn(start, link.element, host, "", Left.UNKNOWN, str(paths.run))
        self._scheduler = scheduler
        self._lease_ttl_s = lease_ttl_s
        self._sleep = sleep

    def take(self) -> Turn | None:
        """Take over the trial and return None, or return the holder's turn if its job still runs.

        Raises EnvironmentFailure if the directory does not answer.
        """
        number, holder = self._newest()
        while True:
            left = Left.UNKNOWN
            if holder is not None:
                if holder.start == self._mine.start:
                    return None  # An earlier call added the turn, then failed.
                departure = self._left(holder)
                if departure is None:
                    return holder
                left = departure
            before = holder.start if holder is not None else ""
            mine = replace(self._mine, before=before, left=left)
            try:
                value = json.dumps(documents.to_json(mine))
                self._names.add(keys.leader_lock(number + 1), value)
            except NameExistsError:
                number, holder = self._newest(number + 1)
                continue
            return None

    def _newest(self, number: int = 0) -> tuple[int, Turn | None]:
        """Return the highest number, at least ``number``, and its turn. Number 0 means no turn."""
        self._names.refresh()
        for key in self._names.find_subtree(keys.leader_locks()):
            tail = key.rpartition("/")[2]
            number = max(number, int(tail) if tail.isdecimal() else 0)
        return number, read_intact_turn(self._names, number) if number else None

    def _left(self, holder: Turn) -> Left | None:
        """Return how the holder has left the trial, or None if it still runs."""
        if holder.job == self._mine.job:
            return Left.PUT_BACK  # Slurm has requeued the holder: this job is its next start.
        if is_another(self._paths, holder.run):
            return Left.ENDED  # The holder runs the original of this copied directory.
        try:
            now = self._scheduler.client.row_of(holder.element)
        except SchedulerError as error:
            logger.info("cannot ask Slurm whether %s runs: %s", holder.element, error)
            return None if self._beats(holder) else Left.UNKNOWN
        if now is None:
            return Left.ENDED
        if now.restarts > holder.restarts or now.raw in ("PENDING", "NODE_FAIL", "PREEMPTED"):
            return Left.PUT_BACK
        if now.raw != "RUNNING":
            return Left.ENDED
        # A job with spares that lost its batch host still runs, but without a batch process.
        return None if holder.host in now.hosts else Left.PUT_BACK

    def _beats(self, holder: Turn) -> bool:
        """Return whether the holder's job has not ended and its first agent renews the lease."""
        ends = events.read_ends(self._paths, f"supervisor.{self._link.group}.{holder.start}")
        if any(event["kind"] == "end" for event in ends):
            return False
        agent = FirstAgent(self._paths, self._names, self._lease_ttl_s)
        if agent.find(holder.start) is None:
            return False
        first = agent.observe()
        while (view := agent.observe()).alive:
            if view.counter != first.counter:
                return True
            self._sleep(self._lease_ttl_s / GAPS_PER_TTL / 2)
        return False


def wait_for_turn(
    lock: LeaderLock,
    link: Link,
    scheduler: SlurmScheduler,
    events: EventWriter,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until this job holds the leader lock; return False if it should exit with 0 instead.

    A job that is not a link of the chain exits. A link is requeued after a wait, which is longer
    after each requeue. If Slurm rejects the requeue, the link waits for the lock without a limit.
    """
    waited_s, longest_s = 0.0, min(LOOK_S * link.restart, LONGEST_WAIT_S)
    reported = False
    while (holder := retry("take the trial over", lock.take)) is not None:
        if not reported:
            logger.warning("%s holds this trial, so this job does not run it", holder.element)
            events.write("surplus", job=link.element, holder=holder.element)
            reported = True
        if reason_to_leave(link.run, link.submission) is not None or not _in_chain(link, scheduler):
            return False
        if waited_s >= longest_s:
            if _put_back(link, holder, scheduler):
                sleep(ENDS_S)
                return False
            longest_s = float("inf")
        sleep(LOOK_S)
        waited_s += LOOK_S
    return True


def _in_chain(link: Link, scheduler: SlurmScheduler) -> bool:
    """Return whether the job belongs to one of the submission's arrays.

    A script that was submitted by hand does not belong to an array. Return True if this is unknown.
    """
    try:
        return link.job in scheduler.recover(link.run, link.submission).get(link.group, (link.job,))
    except EnvironmentFailure as error:
        logger.info("cannot determine whether this job is a link: %s", error)
        return True


def _put_back(link: Link, holder: Turn, scheduler: SlurmScheduler) -> bool:
    """Requeue the job to wait for the running link of its array; return whether it worked."""
    if continues(link) is Continue.NONE:
        return False
    try:
        scheduler.client.throttle(link.job, 1)
        scheduler.client.requeue(link.element)
    except SchedulerError as error:
        logger.warning("this job waits, because it cannot be requeued: %s", error)
        return False
    logger.warning("this job was requeued, because %s holds this trial", holder.element)
    return True
