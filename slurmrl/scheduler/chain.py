"""The chain of a fixed group: which links are queued, and the only way to add more.

The running link and ``slurmrl resume`` both call `top_up`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from slurmrl.fsio import atomic, documents
from slurmrl.fsio.shapes import one_of
from slurmrl.run.history.log import History
from slurmrl.run.history.record import Kind, Record
from slurmrl.run.history.state import fold
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import extensions, stopping
from slurmrl.scheduler.base import Continue, JobState, Scheduler, TaskState

FEW = 2
"""With fewer queued successors than this, a chain is short of links."""
BEING_ENDED = "COMPLETING"
"""Slurm's word for a job that `scancel`, a preemption or the time limit ends."""


@dataclass(frozen=True)
class Chain:
    """The links of a fixed group of one submission."""

    run: RunPaths
    submission: int
    group: str


class TopUp(Enum):
    """Why no links were added."""

    NO_CHAIN = "this trial has no chain of links"
    ENDED = "the trial has ended"
    STOPPED = "a user has stopped the trial"
    NOT_LIVE = "no link waits or runs"
    ENDING = "this job is being ended by Slurm or its user"
    ENOUGH = "enough links are queued"
    NO_COMMIT = "nothing was committed since links were last added"


def top_up(chain: Chain, scheduler: Scheduler, *, by: str, requested: bool = False) -> str | TopUp:
    """Extend a chain that is short of links. Return the id of the new array, or why there is none.

    ``by`` is unique to the caller: its element (``41_3``), or a user and a process. The running
    link adds links only after a commit, since a trial that fails at once would otherwise never end,
    and none while its job is being ended: a user who cancels all links would find others instead.
    ``requested``: a user requests links, so no commit is needed, but a live link is.

    Raises EnvironmentFailure where Slurm's commands do not work on this host, UsageError while
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
    if stopping.requested_by(chain.run, chain.submission):
        return TopUp.STOPPED
    tasks = scheduler.query(scheduler.recover(chain.run, chain.submission))
    if requested and not any(t.group == chain.group and t.state.active for t in tasks):
        return TopUp.NOT_LIVE
    if any(task.job_id == by and task.raw == BEING_ENDED for task in tasks):
        return TopUp.ENDING
    if len(successors(tasks, chain.group, by)) >= FEW:
        return TopUp.ENOUGH
    if not requested and not _committed(chain, records):
        return TopUp.NO_COMMIT
    return None


def successors(tasks: Sequence[TaskState], group: str, element: str = "") -> list[TaskState]:
    """Return the queued elements of a group but ``element``, in the order of their starts."""
    queued = [
        task
        for task in tasks
        if task.group == group and task.state is JobState.PENDING and task.job_id != element
    ]
    return sorted(queued, key=lambda task: task.element)


def continues(chain: Chain) -> Continue:
    """Return what follows a link, as the submission's request says. Submissions of older versions
    are chains."""
    fields = {"continue": one_of(*Continue)}
    path = chain.run.submission_request(chain.submission)
    request = documents.parse(atomic.read_needed(path), path, fields)
    return Continue(request.get("continue") or Continue.CHAIN)


def committed(chain: Chain) -> bool:
    """Return whether there was a commit since the chain was last extended, or submitted."""
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
