"""A link's place in its chain: whether it has anything to do, and what comes after it."""

from __future__ import annotations

from slurmrl import env, log
from slurmrl.errors import EnvironmentFailure
from slurmrl.history.log import History
from slurmrl.history.state import fold
from slurmrl.monitor.snapshot import newest_submission
from slurmrl.paths import RunPaths
from slurmrl.scheduler import make

logger = log.get(__name__)


def reason_to_leave(paths: RunPaths, submission: int) -> str | None:
    """Why this job has nothing to do, or None: an ended trial, or a newer submission."""
    end = fold(History(paths.history).read()).end
    if end is not None:
        return f"the trial has ended ({end.kind})"
    newest = newest_submission(paths)
    if newest is not None and newest.number > submission:
        return f"submission {submission} was followed by a newer one"
    return None


def cancel_links_after_this(group: str) -> None:
    """The last act of a trial. Where scancel does not work here, each link finds out by itself."""
    try:
        make("slurm").cancel({group: (env.ARRAY_JOB_ID.get(),)}, after=env.LINK.get())
    except EnvironmentFailure as error:
        logger.info("the links left over are not cancelled here: %s", error)
