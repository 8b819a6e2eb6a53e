"""What a job does that is not the one that goes on with its trial: it neither trains nor ends that
one, and its link is not used up."""

from __future__ import annotations

import time
from collections.abc import Callable

from slurmrl import log
from slurmrl.backoff import retry
from slurmrl.errors import EnvironmentFailure, SchedulerError
from slurmrl.monitor.events import EventWriter
from slurmrl.scheduler.base import Continue
from slurmrl.scheduler.chain import continues
from slurmrl.scheduler.slurm import SlurmScheduler
from slurmrl.scheduler.succession import Link
from slurmrl.workers.supervisor.baton import Baton, Turn
from slurmrl.workers.supervisor.link import reason_to_leave

logger = log.get(__name__)

LOOK_S = 15.0
LONGEST_WAIT_S = 300.0
"""How long a job waits for its turn before it goes back into the queue, at most."""
ENDS_S = 60.0
"""How long Slurm may take to end a job that was put back."""


def wait_for_turn(
    baton: Baton,
    link: Link,
    scheduler: SlurmScheduler,
    events: EventWriter,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether this job goes on with the trial; else it has nothing to do but to end, with 0.

    A job that is no link of the chain ends. A link goes back into the queue, after a wait that
    grows with each time, and where Slurm does not let it, it waits until it is its turn."""
    waited_s, longest_s = 0.0, min(LOOK_S * link.restart, LONGEST_WAIT_S)
    told = False
    while (holder := retry("take the trial over", baton.take)) is not None:
        if not told:
            logger.warning("%s goes on with this trial, so this job does not", holder.element)
            events.write("surplus", job=link.element, holder=holder.element)
            told = True
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
    """Whether it is one of the submission's arrays, and not a script submitted by hand. Where Slurm
    does not answer and the run directory does not say, it is."""
    try:
        return link.job in scheduler.recover(link.run, link.submission).get(link.group, (link.job,))
    except EnvironmentFailure as error:
        logger.info("it cannot be seen whether this job is a link: %s", error)
        return True


def _put_back(link: Link, holder: Turn, scheduler: SlurmScheduler) -> bool:
    """Into the queue, where it stays until the running link of its array ends."""
    if continues(link) is Continue.NONE:
        return False
    try:
        scheduler.throttle(link.job, 1)
        scheduler.requeue(link.element)
    except SchedulerError as error:
        logger.warning("this job waits, for it cannot be put back into the queue: %s", error)
        return False
    logger.warning("back into the queue: %s goes on with this trial", holder.element)
    return True
