"""Cancellation of a trial by a command."""

from __future__ import annotations

from slurmrl.errors import TrialEndedError
from slurmrl.history.log import History
from slurmrl.history.record import Kind
from slurmrl.history.state import fold
from slurmrl.history.writer import end
from slurmrl.paths import RunPaths, user_name
from slurmrl.submission.live import newest_jobs


def cancel(paths: RunPaths) -> Kind:
    """Write the end into the history, then end the jobs. Return how the trial ended: CANCELLED
    unless another end came first.

    The history comes first, so that a link that starts in the meantime exits by itself.
    """
    try:
        end(History(paths.history), Kind.CANCELLED, {"reason": f"cancelled by {user_name()}"})
        kind = Kind.CANCELLED
    except TrialEndedError:
        before = fold(History(paths.history).read()).end
        kind = before.kind if before else Kind.CANCELLED
    jobs = newest_jobs(paths)
    if jobs is not None:
        jobs.scheduler.cancel(jobs.ids)
    return kind
