"""The end of a job whose batch process was lost with its host.

Slurm ends such a job, but not one with spares (``--no-kill``). What is left of that one ends it:
the agents that see the first agent's lease expire (`workers.agent.leader`), and the watchers
(`workers.supervisor.watcher`), which are there even if no agent is.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slurmrl import log
from slurmrl.backoff import Backoff
from slurmrl.errors import SchedulerError, SlurmrlError
from slurmrl.scheduler.base import Continue
from slurmrl.scheduler.chain import continues
from slurmrl.scheduler.client import SlurmClient, may_have_worked
from slurmrl.scheduler.rows import QueueRow
from slurmrl.scheduler.succession import TIMEOUT_S, Link

logger = log.get(__name__)

ASK_S = (2.0, 60.0)
"""First and longest pause between attempts to end the job."""
ASKED = 30
"""This many attempts: more than 20 minutes."""
REFUSALS = 3
"""So many times Slurm must refuse to requeue a running job until it is cancelled."""


def requeue(link: Link, sleep: Callable[[float], None] = time.sleep) -> None:
    """Requeue the job of a link in place of its batch process, or cancel it where nothing follows.

    Nobody else would end the job before its time limit, so a controller that does not answer is
    asked again, and a job that Slurm refuses to requeue is cancelled."""
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
    """Return what Slurm says about the present start of a link; None if it has forgotten it, or has
    requeued it since. Raises SchedulerError."""
    rows = [row for row in client.queue([link.job]) if link.index in row.elements]
    return next((row for row in rows if row.restarts == link.restart), None)


def _is_requeued(link: Link) -> bool:
    try:
        return continues(link) is not Continue.NONE
    except SlurmrlError as error:
        logger.warning("cannot read how the trial continues: %s", error)
        return True


def _cancel(client: SlurmClient) -> Callable[[str], None]:
    return lambda element: client.cancel([element])


def _holds_hosts(client: SlurmClient, link: Link) -> bool:
    """Return whether the job runs and was not requeued since, as far as Slurm says."""
    try:
        row = this_start(client, link)
    except SchedulerError as error:
        logger.warning("cannot ask about the job: %s", error)
        return True
    return row is not None and row.raw == "RUNNING"
