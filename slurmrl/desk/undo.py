"""What a submission that the scheduler rejects leaves behind: nothing."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurmrl.desk.trial_jobs import remove
from slurmrl.errors import TrialEndedError
from slurmrl.fsio import atomic
from slurmrl.run.history.slots import History, Record
from slurmrl.run.history.state import end
from slurmrl.run.paths import RunPaths


@dataclass(frozen=True)
class Before:
    """The parts of an existing trial that a submission replaces."""

    files: Mapping[Path, bytes]
    end: Record | None

    @staticmethod
    def of(paths: RunPaths, ended: Record | None) -> Before:
        """Raises CorruptFileError, EnvironmentFailure."""
        replaced = (paths.config, paths.plan, paths.estimates)
        return Before({path: atomic.read(path) for path in replaced if path.exists()}, ended)


def undo(paths: RunPaths, number: int, before: Before | None) -> None:
    """Remove a submission that has no jobs, and restore the trial as it was ``before``.

    If ``before`` is None, the trial is new and is removed. Raises EnvironmentFailure.
    """
    if before is None:
        remove(paths)
        return
    for path, content in before.files.items():
        atomic.replace(path, content)
    if before.end is not None:
        with suppress(TrialEndedError):  # cancelled in the meantime
            end(History(paths.history), before.end.kind, before.end.data)
    shutil.rmtree(paths.submission(number), ignore_errors=True)
