"""The next attempt at a rollout task begins as soon as the agent of the one before has ended."""

from __future__ import annotations

from slurmrl import log
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.fsio import atomic
from slurmrl.name_resolve.file import FileNameStore
from slurmrl.run.paths import RunPaths
from slurmrl.watch import published

logger = log.get(__name__)


def begin(paths: RunPaths, group: str, task: int, job: str) -> None:
    """Make the directory of the attempt that the next agent will claim, so that the master gives
    the items of the last one to other tasks. The next agent does it too, but Python's start takes
    it a second, and a minute where its files are on a slow file system.

    ``job``: the start of a job (``JOBID.RESTART``), of which the task's agent has ended.
    """
    try:
        with FileNameStore(paths.names) as names:
            claim = published.newest_claim(names, group, task, job)
        if claim is not None:
            atomic.make_private_directory(paths.rollout_task(group, task, claim.attempt + 1))
    except (CorruptFileError, EnvironmentFailure) as error:
        logger.warning("the items of %s/%d wait for its next agent: %s", group, task, error)
