"""Exclusion of failing hosts from queued and future jobs."""

from __future__ import annotations

from slurmrl import log
from slurmrl.errors import SchedulerError
from slurmrl.run import hosts
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import parse, submission
from slurmrl.scheduler.base import JobState, TaskState
from slurmrl.scheduler.client import SlurmClient, may_have_worked

logger = log.get(__name__)

STARTED = "no longer pending"
"""scontrol's message for elements that have just started; it changes the others."""


def excluded(run: RunPaths, number: int, group: str, *more: str) -> str:
    """Return the hosts that jobs of a group exclude, in Slurm's form: those that the user excludes,
    those that the trial avoids, and ``more``."""
    own = submission.excluded(run, number, group)
    avoided = [one.host for one in hosts.avoided(run)]
    return ",".join(sorted({one for one in (own, *avoided, *more) if one}))


def option(run: RunPaths, number: int, group: str) -> tuple[str, ...]:
    """Return the same as an option of sbatch."""
    text = excluded(run, number, group)
    return (f"--exclude={text}",) if text else ()


def avoid(client: SlurmClient, run: RunPaths, number: int, group: str, host: str, why: str) -> bool:
    """Avoid a host from now on, unless no job of the group could start then."""
    wanted = excluded(run, number, group, host)
    try:
        client.try_out(run.submission_script(number, group), f"--exclude={wanted}")
    except SchedulerError as error:
        logger.warning("%s is not excluded, because no job could start without it: %s", host, error)
        return False
    logger.warning("jobs of this trial exclude %s from now on: %s", host, why)
    hosts.avoid(run, host, why)
    return True


def queued(tasks: list[TaskState], group: str) -> list[str]:
    """Return the pending elements of a group, as ranges of each array: ``41_[2-7]``."""
    waiting: dict[str, list[int]] = {}
    for task in tasks:
        if task.group == group and task.state is JobState.PENDING:
            waiting.setdefault(task.job_id.partition("_")[0], []).append(task.element)
    return [f"{job}_[{parse.element_list(elements)}]" for job, elements in waiting.items()]


def update(
    client: SlurmClient, run: RunPaths, number: int, group: str, tasks: list[TaskState]
) -> bool:
    """Apply the present exclusion to all queued elements of a group. Return False where Slurm
    refuses to change them. Raises SchedulerError where it does not answer."""
    wanted = excluded(run, number, group)
    for elements in queued(tasks, group):
        try:
            client.exclude(elements, wanted)
        except SchedulerError as error:
            if STARTED in str(error):
                continue
            if may_have_worked(error):
                raise
            logger.warning("cannot exclude %s from %s: %s", wanted or "no host", elements, error)
            return False
    return True
