"""The end of a link: top-up of its chain, requeue, and cancellation of what an ended trial no
longer needs."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass

from slurmrl import env, log
from slurmrl.errors import CorruptFileError, EnvironmentFailure, SchedulerError, UsageError
from slurmrl.run import hosts, leave
from slurmrl.run.history.log import History
from slurmrl.run.history.record import Kind
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import environment, submission
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
    """Make sure that the trial, which has not ended, continues when this link ends; return how.
    ``extend``: no other thread of this process is extending the chain. ``lost_host``: the link ends
    because too few of its hosts are left, so it is requeued, as Slurm does after a node failure.

    Call it last: a requeued link gets TERM at once. A link in which nothing began is not requeued,
    since it would fail again and again.
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
        return f"cannot find out what follows this job: {error}"
    after = successors(tasks, link.group, link.element)
    if not after:
        return "no link is left: slurmrl resume resumes the trial"
    return f"{after[0].job_id} follows, {len(after)} left"


def give_back(link: Link, why: str, host: str) -> None:
    """Requeue a link in which nothing began, without ``host`` (empty: no host is to blame). Call it
    last: Slurm ends this job. See `run.leave`."""
    script = link.run.submission_script(link.submission, link.group)
    try:
        name = submission.directive(link.run, link.submission, link.group, "job-name")
        excluded = submission.excluded(link.run, link.submission, link.group)
    except (CorruptFileError, EnvironmentFailure) as error:
        logger.error("this job is not requeued: %s", error)
        return
    text = leave.functions(link.run.run, script, name, excluded)
    command = ["sh", "-c", f'{text}\nslurmrl_give_back "$1" "$2"', "sh", why, host]
    subprocess.run(command, check=False, env=environment.of_command(os.environ) | _here())


def _here() -> dict[str, str]:
    """Return the variables of this job that the shell needs and of_command leaves out."""
    known = (env.ARRAY_JOB_ID, env.JOB_ID, env.LINK, env.NODE_NAME, env.RESTART_COUNT)
    return {one.name: os.environ[one.name] for one in known if one.name in os.environ}


def keep_off(link: Link, scheduler: SlurmScheduler | None = None) -> None:
    """Exclude the hosts that the trial avoids from the queued links. Raises EnvironmentFailure,
    UsageError."""
    if hosts.avoided(link.run):
        scheduler = scheduler or slurm()
        scheduler.keep_off(link.run, link.submission, link.group, by=link.element)


def end_chain(link: Link, scheduler: SlurmScheduler | None = None) -> None:
    """Cancel all jobs of an ended trial but this one. Where scancel does not work here, each link
    exits when it starts."""
    scheduler = scheduler or slurm()
    try:
        jobs = scheduler.recover(link.run, link.submission) or {link.group: (link.job,)}
        scheduler.cancel(jobs, spare=link.element)
    except (EnvironmentFailure, CorruptFileError) as error:
        logger.info("the remaining links were not cancelled: %s", error)


def slurm() -> SlurmScheduler:
    return SlurmScheduler(SlurmClient(TIMEOUT_S))


def _last_top_up(link: Link, scheduler: SlurmScheduler) -> None:
    """Top up at the end of a link that was too short for `Upkeep`, or committed only at its end."""
    try:
        top_up(link, scheduler, by=link.element)
    except (EnvironmentFailure, CorruptFileError, UsageError) as error:
        logger.info("the chain was not extended: %s", error)


def _keep_off(link: Link, scheduler: SlurmScheduler) -> None:
    try:
        keep_off(link, scheduler)
    except (EnvironmentFailure, CorruptFileError, UsageError) as error:
        logger.info("the queued links are unchanged: %s", error)


def _requeue(link: Link, scheduler: SlurmScheduler) -> str:
    tag = f"{env.JOB_ID.get()}.{link.restart}."
    begins = [r for r in History(link.run.history).read() if r.kind is Kind.BEGIN]
    if not any(f"{record.data.get('job', '')}.".startswith(tag) for record in begins):
        return "nothing began in this job, so it is not requeued"
    if not scheduler.runs(link.element):
        return f"{link.element} is being ended by Slurm or its user, so it is not requeued"
    scheduler.requeue(link.element)
    with contextlib.suppress(SchedulerError, CorruptFileError):  # it may have started again
        scheduler.exclude(link.run, link.submission, link.group, link.element)
    return f"{link.element} was requeued"
