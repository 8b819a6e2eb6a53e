"""Whether a link has anything to do, and the end of a trial for a user error."""

from __future__ import annotations

from slurmrl import log
from slurmrl.backoff import retry
from slurmrl.errors import TrialEndedError
from slurmrl.run.history.log import History
from slurmrl.run.history.record import Kind
from slurmrl.run.history.state import fold
from slurmrl.run.history.writer import end
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import stopping
from slurmrl.watch.snapshot import newest_submission

logger = log.get(__name__)


def reason_to_leave(paths: RunPaths, submission: int) -> str | None:
    """Return why this job has nothing to do (an ended trial, a newer submission, a stop), or None.

    Waits while the directory does not answer: if links failed instead, the whole chain would be
    used up.
    """
    return retry("read the history", lambda: _reason(paths, submission))


def end_as_failed(paths: RunPaths, submission: int, reason: str) -> None:
    """End the trial because of a user error that every other job and host would meet too, before
    an incarnation that could report it. A trial that ended already, or that a newer submission has
    taken over, stays as it is.

    Call it only from the job that holds the trial: another job may be running it.
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
        return f"submission {submission} was superseded by a newer one"
    if by := stopping.requested_by(paths, submission):
        return f"submission {submission} was stopped by {by}"
    return None
