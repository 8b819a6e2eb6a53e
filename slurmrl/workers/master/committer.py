"""Commits: checkpoint files, manifest, then the history slot; and the cleaning up of old ones."""

from __future__ import annotations

import shutil
from typing import Any

from slurmrl import log
from slurmrl.checkpoint.manifest import write_manifest
from slurmrl.fsio.atomic import make_private_directory
from slurmrl.history.record import Kind
from slurmrl.history.state import Commit
from slurmrl.history.writer import IncarnationWriter
from slurmrl.paths import RunPaths
from slurmrl.workers import messages
from slurmrl.workers.master.workforce import Workforce

logger = log.get(__name__)


class Committer:
    def __init__(
        self,
        paths: RunPaths,
        writer: IncarnationWriter,
        workforce: Workforce,
        commits: tuple[Commit, ...],
        keep_last: int,
        timeout_s: float,
    ) -> None:
        self.paths = paths
        self.writer = writer
        self.workforce = workforce
        self.commits = list(commits)
        self.keep_last = keep_last
        self.timeout_s = timeout_s

    @property
    def last_step(self) -> int | None:
        return self.commits[-1].step if self.commits else None

    def commit(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint of ``step`` and make it exist by naming it in the history."""
        directory = self.paths.checkpoint(step, self.writer.incarnation)
        make_private_directory(directory)
        (number,) = self.workforce.post(
            {"type": messages.SAVE, "step": step, "directory": directory.name}
        )
        answers = self.workforce.collect(number, f"saving step {step}", self.timeout_s)
        files = [file for rank in sorted(answers) for file in answers[rank]["files"]]
        write_manifest(directory, step=step, files=files, state=state)
        record = self.writer.append(Kind.COMMIT, {"step": step, "directory": directory.name})
        self.commits.append(Commit(step, directory.name, record.incarnation, record.data))
        logger.info("committed step %d", step)
        self._delete_old()

    def _delete_old(self) -> None:
        """Drop commits beyond the newest ``keep_last``: first from the history, then from disk."""
        while len(self.commits) > self.keep_last:
            old = self.commits.pop(0)
            self.writer.append(Kind.DELETE, {"step": old.step, "directory": old.directory})
            shutil.rmtree(self.paths.checkpoints / old.directory, ignore_errors=True)
