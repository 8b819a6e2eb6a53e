"""Whether a link has anything to do."""

from __future__ import annotations

from slurmrl.history.log import History
from slurmrl.history.state import fold
from slurmrl.monitor.snapshot import newest_submission
from slurmrl.paths import RunPaths
from slurmrl.workers.retry import retry


def reason_to_leave(paths: RunPaths, submission: int) -> str | None:
    """Why this job has nothing to do, or None: an ended trial, or a newer submission.

    Waits while the directory does not answer: a link that failed instead would be followed by the
    next one, which fails the same way, until none is left.
    """
    return retry("read the history", lambda: _reason(paths, submission))


def _reason(paths: RunPaths, submission: int) -> str | None:
    end = fold(History(paths.history).read()).end
    if end is not None:
        return f"the trial has ended ({end.kind})"
    newest = newest_submission(paths)
    if newest is not None and newest.number > submission:
        return f"submission {submission} was followed by a newer one"
    return None
