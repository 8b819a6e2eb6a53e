"""The checkpoints of a trial that the trials of `evaluation.tasks` read: folders in
``being_evaluated/`` with links to their files.

A checkpoint is linked as soon as it is seen, so that its trial may delete it however late its
evaluations are submitted. The folder is removed once all of them have ended. Those in ``export/``,
which `slurmrl eval` and ``trial:`` references make, stay: nobody knows who else reads them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from typing import Final

from slurmrl import log
from slurmrl.config.load import load_resolved
from slurmrl.errors import SlurmrlError
from slurmrl.fsio import atomic
from slurmrl.fsio.primitives import is_temporary
from slurmrl.registry import resolve
from slurmrl.run.history.recent import recent
from slurmrl.run.history.record import Kind
from slurmrl.run.history.state import Commit
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint.pinned import ORIGIN, is_pinned
from slurmrl.workers.supervisor import evaluating_trials

logger = log.get(__name__)

PIN: Final = "slurmrl.workers.master.exporting:pin_to_evaluate"
"""It reads models, so it is loaded where a checkpoint is to be evaluated only."""
_FOLDER: Final = re.compile(r"(step-(\d+)\.(\d+))-checkpoint")


def link(paths: RunPaths, commit: Commit) -> None:
    """Make the folder of a commit, if it is not there. Raises SlurmrlError."""
    if not is_pinned(paths.checkpoint_to_evaluate(commit.directory)):
        resolve(PIN)(paths, commit)


def linked(paths: RunPaths) -> list[Commit]:
    """The checkpoints that have a folder. Raises EnvironmentFailure."""
    try:
        names = atomic.list_names(paths.being_evaluated)
    except FileNotFoundError:
        return []
    found = (_FOLDER.fullmatch(name) for name in names)
    return [Commit(int(match[2]), match[1], int(match[3])) for match in found if match]


def sweep(paths: RunPaths, *, given_up: bool = False) -> None:
    """Remove the folders that no evaluation needs: all of its suites were submitted, or the others
    are ``given_up``, and have ended. Any process may do so. Raises nothing: a later one makes up
    for it."""
    try:
        commits = linked(paths)
        suites = load_resolved(paths.config).evaluations if commits else {}
        for commit in commits:
            wanted: Collection[str] = () if given_up else suites
            if _submitted(paths, commit, wanted) and not _in_use(paths, commit, len(wanted)):
                folder = paths.checkpoint_to_evaluate(commit.directory)
                atomic.remove(folder / ORIGIN)  # what a kill leaves is none to be read
                shutil.rmtree(folder, ignore_errors=True)
    except (SlurmrlError, OSError) as error:  # a file system may not tell what is there
        logger.info("checkpoints that were evaluated stay for now: %s", error)


def remove_leftovers(paths: RunPaths) -> None:
    """Remove what a killed `link` has left; for the only process that links."""
    with suppress(OSError):
        for path in paths.being_evaluated.iterdir():
            if is_temporary(path.name):
                shutil.rmtree(path, ignore_errors=True)


def _submitted(paths: RunPaths, commit: Commit, suites: Collection[str]) -> bool:
    return all(paths.evaluation_mark(commit.directory, suite).exists() for suite in suites)


def _in_use(paths: RunPaths, commit: Commit, least: int) -> bool:
    """Whether an evaluation reads the folder or may do so again: a failed one can be resumed. Of
    ``least`` trials that do or did so, a stale listing may lack those submitted last."""
    folder = paths.checkpoint_to_evaluate(commit.directory)
    trials = evaluating_trials.users(paths, commit.step, folder)
    if len(trials) < least:
        return True
    ends = [recent(trial.history, exports=False).end for trial in trials]
    return any(end is None or end.kind is Kind.FAILED for end in ends)
