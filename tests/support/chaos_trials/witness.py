"""An observer that records the data and the end of each incarnation. Later incarnations remove
control logs, so it keeps a hard link to each.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from slurmrl.run import metrics
from slurmrl.run.channel.message_log import LogReader
from slurmrl.run.history.slots import History, Kind, Record
from slurmrl.run.history.state import TrialState, fold
from slurmrl.run.paths import RunPaths
from slurmrl.workers.messages import CONTROL_LOG, LoadBatch

Items = list[list[int]]


class Witness:
    """Observes a run directory from outside; `look` records new files and batches."""

    def __init__(self, paths: RunPaths, folder: Path) -> None:
        """``folder`` gets the links and is on the same file system."""
        self.paths = paths
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.state = TrialState()
        self.records: list[Record] = []
        self.posted: dict[int, dict[int, Items]] = {}
        """The posted batches, by incarnation and step."""
        self._history = History(paths.history)
        self._logs: dict[int, LogReader] = {}

    def look(self) -> None:
        self.records = self._history.read()
        self.state = fold(self.records)
        self._keep_log(self.state.incarnation)
        for incarnation, log in self._logs.items():
            batches = self.posted.setdefault(incarnation, {})
            for message in log.read():
                order = CONTROL_LOG.from_json(message)
                if isinstance(order, LoadBatch) and not order.evaluation:
                    batches[order.step] = [list(item) for item in order.items]

    def _keep_log(self, incarnation: int) -> None:
        link = self.folder / str(incarnation)
        if incarnation and incarnation not in self._logs:
            with suppress(FileNotFoundError):
                os.link(self.paths.master_log(incarnation), link)
                self._logs[incarnation] = LogReader(link)

    @property
    def news(self) -> int:
        """Number of records and batches seen."""
        return len(self.records) + sum(len(batches) for batches in self.posted.values())

    def job(self, incarnation: int) -> str:
        """Return the tag of the job of an incarnation."""
        return next(
            str(record.data.get("job", ""))
            for record in self.records
            if record.kind is Kind.BEGIN and record.incarnation == incarnation
        )

    def batches(self, incarnation: int) -> dict[int, Items]:
        """The posted batches by step."""
        return self.posted.get(incarnation, {})

    def has_posted(self, incarnation: int, step: int) -> bool:
        """Return whether the batch of ``step`` or of a later step was posted."""
        return any(posted >= step for posted in self.batches(incarnation))

    def is_committing(self, incarnation: int, step: int) -> bool:
        """Return whether there is an uncommitted checkpoint of ``step`` or of a later step."""
        committed = {commit.directory for commit in self.state.commits}
        for name in os.listdir(self.paths.checkpoints):
            of_step, _, writer = name.removeprefix("step-").partition(".")
            if writer == str(incarnation) and int(of_step) >= step and name not in committed:
                return True
        return False

    def has_trained(self, incarnation: int) -> bool:
        """Return whether this incarnation has finished a step."""
        batches = self.batches(incarnation)
        if not batches:
            return False
        latest = metrics.read_latest(self.paths.metrics, 1)
        return bool(latest) and latest[0]["step"] >= min(batches)

    def committed(self) -> dict[int, Items]:
        """Return the batch of each committed step, by the incarnation that committed it. Raises
        AssertionError if a step was committed twice.
        """
        found: dict[int, Items] = {}
        last = 0
        for record in self.records:
            if record.kind is Kind.COMMIT:
                for step in range(last + 1, record.data["step"] + 1):
                    assert step not in found, f"step {step} was committed twice"
                    found[step] = self.posted[record.incarnation][step]
                last = record.data["step"]
        return found
