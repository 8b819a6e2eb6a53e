"""What comes after a link, as the link itself sees to it: it makes sure that successors are queued
while the trial gets on, puts itself back into the queue where that is asked for, and takes back
what an ended trial does not need."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass

from slurmrl import env, log
from slurmrl.errors import CorruptFileError, EnvironmentFailure, SchedulerError, UsageError
from slurmrl.history.log import History
from slurmrl.history.record import Kind
from slurmrl.paths import RunPaths
from slurmrl.scheduler import environment, hosts, leave, submission
from slurmrl.scheduler.base import Continue
from slurmrl.scheduler.chain import Chain, continues, successors, top_up
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.slurm import SlurmScheduler

logger = log.get(__name__)

TIMEOUT_S = 45.0
"""For each of Slurm's commands: a controller that does not answer must not keep hosts for long."""


@dataclass(frozen=True)
class Link(Chain):
    """The element of a chain that this process belongs to."""

    job: str
    """Id of its array."""
    index: int
    restart: int = 0

    @staticmethod
    def here(run: RunPaths, submission: int, group: str) -> Link:
        job, restart = env.ARRAY_JOB_ID.get(), env.RESTART_COUNT.get()
        return Link(run, submission, group, job, env.LINK.get(), restart)

    @property
    def element(self) -> str:
        """Its name for Slurm. A bare job id can mean the whole array."""
        return f"{self.job}_{self.index}"


def continue_after(
    link: Link,
    scheduler: SlurmScheduler | None = None,
    *,
    extend: bool = True,
    lost_host: bool = False,
) -> str:
    """See to it that the trial, which has not ended, goes on when this link ends; says how.
    ``extend``: no other thread of this process is extending the chain. ``lost_host``: it ends
    because it has too few hosts left, so it is put back into the queue as Slurm does after a node
    failure.

    Call it last: a link that is put back into the queue gets TERM at once. One in which nothing
    began is not, since it would fail for ever.
    """
    scheduler = scheduler or slurm()
    try:
        goes_on = continues(link)
        if goes_on is Continue.NONE:
            return "nothing follows this job (continue: none)"
        if extend and goes_on is Continue.CHAIN:
            _last_top_up(link, scheduler)
        _keep_off(link, scheduler)
        if goes_on is Continue.REQUEUE or lost_host:
            return _requeue(link, scheduler)
        tasks = scheduler.query(scheduler.recover(link.run, link.submission))
    except (EnvironmentFailure, CorruptFileError) as error:
        return f"what follows this job is not known here: {error}"
    after = successors(tasks, link.group, link.element)
    if not after:
        return "no link is left: slurmrl resume goes on with the trial"
    return f"{after[0].job_id} follows, {len(after)} left"


def give_back(link: Link, why: str, host: str) -> None:
    """Put a link in which nothing began back into the queue, off ``host`` (empty: no host is to
    blame). Call it last: Slurm ends this job. See `scheduler.leave`."""
    script = link.run.submission_script(link.submission, link.group)
    try:
        name = submission.directive(link.run, link.submission, link.group, "job-name")
        excluded = submission.excluded(link.run, link.submission, link.group)
    except (CorruptFileError, EnvironmentFailure) as error:
        logger.error("this job is not put back into the queue: %s", error)
        return
    text = leave.functions(link.run.run, script, name, excluded)
    command = ["sh", "-c", f'{text}\nslurmrl_give_back "$1" "$2"', "sh", why, host]
    subprocess.run(command, check=False, env=environment.of_command(os.environ) | _here())


def _here() -> dict[str, str]:
    """What the shell has to know of this job, which of_command leaves out."""
    known = (env.ARRAY_JOB_ID, env.JOB_ID, env.LINK, env.NODE_NAME, env.RESTART_COUNT)
    return {one.name: os.environ[one.name] for one in known if one.name in os.environ}


def keep_off(link: Link, scheduler: SlurmScheduler | None = None) -> None:
    """Keep what is queued off the hosts that the trial avoids. Raises EnvironmentFailure,
    UsageError."""
    if hosts.avoided(link.run):
        scheduler = scheduler or slurm()
        scheduler.keep_off(link.run, link.submission, link.group, by=link.element)


def end_chain(link: Link, scheduler: SlurmScheduler | None = None) -> None:
    """The last act of a trial: cancel all of its jobs but this one. Where scancel does not work
    here, each finds out by itself."""
    scheduler = scheduler or slurm()
    try:
        jobs = scheduler.recover(link.run, link.submission) or {link.group: (link.job,)}
        scheduler.cancel(jobs, spare=link.element)
    except (EnvironmentFailure, CorruptFileError) as error:
        logger.info("the links left over are not cancelled here: %s", error)


def slurm() -> SlurmScheduler:
    return SlurmScheduler(SlurmClient(TIMEOUT_S))


def _last_top_up(link: Link, scheduler: SlurmScheduler) -> None:
    """For a link too short for its upkeep, or one that had committed nothing until it ended."""
    try:
        top_up(link, scheduler, by=link.element)
    except (EnvironmentFailure, CorruptFileError, UsageError) as error:
        logger.info("the chain was not extended: %s", error)


def _keep_off(link: Link, scheduler: SlurmScheduler) -> None:
    try:
        keep_off(link, scheduler)
    except (EnvironmentFailure, CorruptFileError, UsageError) as error:
        logger.info("the queued links are left as they are: %s", error)


def _requeue(link: Link, scheduler: SlurmScheduler) -> str:
    tag = f"{env.JOB_ID.get()}.{link.restart}."
    begins = [r for r in History(link.run.history).read() if r.kind is Kind.BEGIN]
    if not any(f"{record.data.get('job', '')}.".startswith(tag) for record in begins):
        return "nothing began in this job, so it is not put back into the queue"
    if not scheduler.runs(link.element):
        return f"{link.element} is being ended by Slurm or its user, so it is not put back"
    scheduler.requeue(link.element)
    with contextlib.suppress(SchedulerError, CorruptFileError):  # it may have started again
        scheduler.exclude(link.run, link.submission, link.group, link.element)
    return f"{link.element} was put back into the queue"
