"""Surplus jobs: a job whose trial another job holds neither trains nor uses up its link."""

from __future__ import annotations

import time
from collections.abc import Callable

from slurmrl import log
from slurmrl.backoff import retry
from slurmrl.errors import EnvironmentFailure, SchedulerError
from slurmrl.run.events import EventWriter
from slurmrl.scheduler.base import Continue
from slurmrl.scheduler.chain import continues
from slurmrl.scheduler.slurm import SlurmScheduler
from slurmrl.scheduler.succession import Link
from slurmrl.workers.link import reason_to_leave
from slurmrl.workers.supervisor.baton import Baton
from slurmrl.workers.turns import Turn

logger = log.get(__name__)

LOOK_S = 15.0
LONGEST_WAIT_S = 300.0
"""Longest wait for the turn before a job is requeued."""
ENDS_S = 60.0
"""How long Slurm may take to end a requeued job."""


def wait_for_turn(
    baton: Baton,
    link: Link,
    scheduler: SlurmScheduler,
    events: EventWriter,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Wait until this job holds the trial; return False if it should exit with 0 instead.

    A job that is not a link of the chain exits. A link is requeued after a wait that grows with
    each requeue; if Slurm refuses that, it waits for its turn.
    """
    waited_s, longest_s = 0.0, min(LOOK_S * link.restart, LONGEST_WAIT_S)
    reported = False
    while (holder := retry("take the trial over", baton.take)) is not None:
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
    """Return whether the job belongs to one of the submission's arrays, as opposed to a script
    submitted by hand. If neither Slurm nor the run directory can tell, it does."""
    try:
        return link.job in scheduler.recover(link.run, link.submission).get(link.group, (link.job,))
    except EnvironmentFailure as error:
        logger.info("cannot tell whether this job is a link: %s", error)
        return True


def _put_back(link: Link, holder: Turn, scheduler: SlurmScheduler) -> bool:
    """Requeue the job, which then stays queued until the running link of its array ends."""
    if continues(link) is Continue.NONE:
        return False
    try:
        scheduler.throttle(link.job, 1)
        scheduler.requeue(link.element)
    except SchedulerError as error:
        logger.warning("this job waits, because it cannot be requeued: %s", error)
        return False
    logger.warning("requeued: %s holds this trial", holder.element)
    return True
