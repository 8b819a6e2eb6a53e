"""The chain of a fixed group: its queued links, added links, and the end of a link.

The running link and ``slurmrl resume`` both call `top_up`. If Slurm's commands do not work on the
link's host, the chain cannot grow beyond the jobs of its submission.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from slurmrl import env, log
from slurmrl.errors import (
    CorruptFileError,
    EnvironmentFailure,
    SchedulerError,
    SlurmrlError,
    UsageError,
)
from slurmrl.fsio import atomic, documents
from slurmrl.fsio.documents import one_of
from slurmrl.run import hosts
from slurmrl.run.history.slots import History, Kind, Record
from slurmrl.run.history.state import fold
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import JobTag
from slurmrl.scheduler import base, extensions, submission
from slurmrl.scheduler.base import Continue, JobState, Scheduler, TaskState
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.slurm import Change, ElasticGroup, SlurmScheduler
from slurmrl.scheduler.submission import remove_orphaned, stop_requested_by, wanted_tasks

logger = log.get(__name__)

FEW = 2
"""Number of queued successors below which a chain needs more links."""
BEING_ENDED = "COMPLETING"
"""Slurm's state of a job that `scancel`, a preemption or the time limit is ending."""
TIMEOUT_S = 45.0
"""Time limit of a Slurm command in seconds. A controller that does not answer must not block hosts
for long."""
TRIES = 3
"""Number of failed calls of sbatch after which a link no longer extends its chain."""
RETRY_S = 120.0
"""Seconds between two calls of sbatch if the first failed, for example without a controller."""
COMMIT_S = 15.0
"""Seconds between two checks for the first commit."""
KEEP_S = 60.0
"""Seconds between two checks of an elastic group. Each failure in a row doubles the time."""
LONGEST_S = 3600.0
"""Maximum seconds between two checks of an elastic group."""


@dataclass(frozen=True)
class Chain:
    """The links of a fixed group of one submission."""

    run: RunPaths
    submission: int
    group: str


class TopUp(Enum):
    """Reason why no links were added."""

    NO_CHAIN = "this trial has no chain of links"
    ENDED = "the trial has ended"
    STOPPED = "a user has stopped the trial"
    NOT_LIVE = "no link waits or runs"
    ENDING = "Slurm or the user is ending this job"
    ENOUGH = "enough links are queued"
    NO_COMMIT = "nothing was committed since links were last added"


def top_up(chain: Chain, scheduler: Scheduler, *, by: str, requested: bool = False) -> str | TopUp:
    """Extend a chain that needs links; return the id of the new array, or why there is none.

    ``by`` is unique to the caller: its element (``41_3``), or a user and a process. The running
    link adds links only after a commit, because a trial whose starts all fail must end. While Slurm
    ends its job, the link adds no links, because the user may be cancelling all links. With
    ``requested``, a user requests links. A commit is then not needed, but a link must wait or run.

    Raises EnvironmentFailure if Slurm's commands do not work on this host, and UsageError while
    another process extends the chain.
    """
    reason = why_not(chain, scheduler, by=by, requested=requested)
    if reason is not None:
        return reason
    return scheduler.extend(chain.run, chain.submission, chain.group, by=by)


def why_not(
    chain: Chain, scheduler: Scheduler, *, by: str, requested: bool = False
) -> TopUp | None:
    """Return why `top_up` would add nothing, or None if it would extend the chain."""
    if continues(chain) is not Continue.CHAIN:
        return TopUp.NO_CHAIN
    records = History(chain.run.history).read()
    if fold(records).end is not None:
        return TopUp.ENDED
    if stop_requested_by(chain.run, chain.submission):
        return TopUp.STOPPED
    tasks = scheduler.query(scheduler.recover(chain.run, chain.submission))
    if requested and not any(t.group == chain.group and t.state.active for t in tasks):
        return TopUp.NOT_LIVE
    if any(task.job_id == by and task.raw == BEING_ENDED for task in tasks):
        return TopUp.ENDING
    queued = len(successors(tasks, chain.group, by))
    return shortage(queued, has_committed=requested or _committed(chain, records))


def shortage(queued: int, *, has_committed: bool) -> TopUp | None:
    """Return why a chain with ``queued`` successors gets no more links; None if it gets links.

    ``has_committed`` is true if a commit was made since links were last added.
    """
    if queued >= FEW:
        return TopUp.ENOUGH
    return None if has_committed else TopUp.NO_COMMIT


def successors(tasks: Sequence[TaskState], group: str, element: str = "") -> list[TaskState]:
    """Return the queued elements of a group except ``element``, in the order of their starts."""
    queued = [
        task
        for task in tasks
        if task.group == group and task.state is JobState.PENDING and task.job_id != element
    ]
    return sorted(queued, key=lambda task: task.element)


def continues(chain: Chain) -> Continue:
    """Return the way in which the trial continues after a link, from the submission's request.

    Requests of older versions do not name a way: such trials continue by a chain.
    """
    fields = {"continue": one_of(*Continue)}
    path = chain.run.submission_request(chain.submission)
    request = documents.parse(atomic.read_needed(path), path, fields)
    return Continue(request.get("continue") or Continue.CHAIN)


def committed(chain: Chain) -> bool:
    """Return whether a commit was made since the chain was last extended, or submitted."""
    return _committed(chain, History(chain.run.history).read())


def _committed(chain: Chain, records: Sequence[Record]) -> bool:
    extended = extensions.read(chain.run, chain.submission, chain.group)
    added = [extension.claim for extension in extended if extension.job is not None]
    since = added[-1].records if added else None
    for record in records:
        if since is None and record.kind is Kind.BEGIN:
            since = record.slot if record.data.get("submission") == chain.submission else None
        if since is not None and record.slot >= since and record.kind is Kind.COMMIT:
            return True
    return False


@dataclass(frozen=True)
class Link(Chain):
    """The element of a chain that this process belongs to."""

    job: str
    """Id of its array."""
    index: int
    restart: int = 0
    path: str = ""
    """PATH of the job before ``cluster.env`` and the variables file replace it."""

    @staticmethod
    def here(run: RunPaths, submission: int, group: str) -> Link:
        job, restart = env.ARRAY_JOB_ID.get(), env.RESTART_COUNT.get()
        path = os.environ.get("PATH", "")
        return Link(run, submission, group, job, env.LINK.get(), restart, path)

    @property
    def element(self) -> str:
        """Slurm's name of the element, such as ``41_3``. A bare job id can mean the whole array."""
        return f"{self.job}_{self.index}"


def continue_after(
    link: Link,
    scheduler: SlurmScheduler | None = None,
    *,
    extend: bool = True,
    lost_host: bool = False,
) -> str:
    """Ensure that an unfinished trial continues after this link; return a message for the log.

    With ``extend``, extend the chain if it needs links. No other thread of this process may extend
    the chain. With ``lost_host``, too few hosts are left: requeue the link, as Slurm does after a
    node failure. Do not requeue a link in which no incarnation began, because it would fail again.

    Call this function last, because Slurm sends TERM to a requeued link at once.
    """
    scheduler = scheduler or slurm()
    try:
        goes_on = continues(link)
        if goes_on is Continue.NONE:
            return "nothing follows this job (continue: none)"
        if extend and goes_on is Continue.CHAIN:
            # `Upkeep` extends nothing if the link was short or committed only at its end.
            try:
                top_up(link, scheduler, by=link.element)
            except (EnvironmentFailure, CorruptFileError, UsageError) as error:
                logger.info("the chain was not extended: %s", error)
        keep_off(link, scheduler)
        if goes_on is Continue.REQUEUE or lost_host:
            return _requeue(link, scheduler)
        tasks = scheduler.query(scheduler.recover(link.run, link.submission))
    except (EnvironmentFailure, CorruptFileError) as error:
        return f"cannot determine which job follows this job: {error}"
    after = successors(tasks, link.group, link.element)
    if not after:
        return "no link is left: slurmrl resume resumes the trial"
    return f"{after[0].job_id} follows, {len(after)} left"


def give_back(link: Link, why: str, host: str) -> None:
    """Requeue a link in which no incarnation began, and exclude ``host`` for the link.

    An empty ``host`` excludes none. Call this function last, because Slurm ends this job.
    """
    script = link.run.submission_script(link.submission, link.group)
    try:
        name = submission.directive(link.run, link.submission, link.group, "job-name")
        excluded = submission.excluded_by_user(link.run, link.submission, link.group)
    except (CorruptFileError, EnvironmentFailure) as error:
        logger.error("this job is not requeued: %s", error)
        return
    text = hosts.leave_functions(link.run.run, script, name, excluded)
    command = ["/bin/sh", "-c", f'{text}\nslurmrl_give_back "$1" "$2"', "sh", why, host]
    subprocess.run(command, check=False, env=base.command_environment(os.environ) | _here(link))


def _here(link: Link) -> dict[str, str]:
    """Return the variables that `command_environment` omits or `cluster.env` may replace."""
    known = (env.ARRAY_JOB_ID, env.JOB_ID, env.LINK, env.NODE_NAME, env.RESTART_COUNT)
    found = {one.name: os.environ[one.name] for one in known if one.name in os.environ}
    return found | ({"PATH": link.path} if link.path else {})


def keep_off(link: Link, scheduler: SlurmScheduler | None = None) -> None:
    """Exclude the trial's avoided hosts for its queued links. Log a failure."""
    try:
        if hosts.avoided(link.run):
            (scheduler or slurm()).keep_off(link.run, link.submission, link.group, by=link.element)
    except (EnvironmentFailure, CorruptFileError, UsageError) as error:
        logger.info("the queued links are unchanged: %s", error)


def end_chain(link: Link, scheduler: SlurmScheduler | None = None) -> None:
    """Cancel all jobs of an ended trial except the job of this link.

    If scancel does not work on this host, each remaining link exits when it starts.
    """
    scheduler = scheduler or slurm()
    try:
        jobs = scheduler.recover(link.run, link.submission) or {link.group: (link.job,)}
        scheduler.cancel(jobs, spare=link.element)
    except (EnvironmentFailure, CorruptFileError) as error:
        logger.info("the remaining links were not cancelled: %s", error)


def slurm() -> SlurmScheduler:
    return SlurmScheduler(SlurmClient(TIMEOUT_S))


def _requeue(link: Link, scheduler: SlurmScheduler) -> str:
    begins = [r for r in History(link.run.history).read() if r.kind is Kind.BEGIN]
    start = f"{env.JOB_ID.get()}.{link.restart}"
    if all(JobTag.of(record.data).start != start for record in begins):
        return "no incarnation began in this job, so it is not requeued"
    row = scheduler.client.row_of(link.element)
    if row is not None and row.raw != "RUNNING":
        return f"Slurm or the user is ending {link.element}, so it is not requeued"
    scheduler.client.requeue(link.element)
    # The exclusion fails if the link has already started again.
    with contextlib.suppress(SchedulerError, CorruptFileError):
        scheduler.exclude(link.run, link.submission, link.group, link.element)
    return f"{link.element} was requeued"


class Upkeep:
    """Threads that extend the chain and adjust elastic groups, so that the link need not wait.

    These threads receive no signals.
    """

    def __init__(self, link: Link, elastic: Mapping[str, int], told: Callable[[str], None]) -> None:
        """Make the threads for a link's chain and for the groups in ``elastic``.

        ``elastic`` maps each group to its planned number of tasks. The thread of the chain calls
        ``told`` with the id of each added array.
        """
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
                thread.start()  # The thread inherits the blocked signals.
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def stop(self) -> bool:
        """Stop the threads; return whether all of them have ended.

        Wait at most until hanging commands of the threads have timed out.
        """
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        return not any(thread.is_alive() for thread in self._threads)

    def _keep_chain(self) -> None:
        keep_off(self._link)
        failures = 0
        while failures < TRIES and not self._stop.is_set():
            try:
                outcome = top_up(self._link, slurm(), by=self._link.element)
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
        """Wait for a commit. Return False if the link ends first."""
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
                if stop_requested_by(link.run, link.submission):
                    return
                remove_orphaned(link.run, name)  # The trainers run here, so they are not missing.
                change = group.keep(wanted_tasks(link.run, name, planned))
            except SlurmrlError as error:
                logger.info("group %s is unchanged: %s", name, error)
                pause_s = min(max(2 * pause_s, KEEP_S), LONGEST_S)
            else:
                pause_s = KEEP_S
                if change != Change():
                    logger.info("group %s: %s", name, change)
