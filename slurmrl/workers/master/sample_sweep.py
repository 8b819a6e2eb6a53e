"""Removal of samples that no commit needs, a little at each look."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from slurmrl import log
from slurmrl.data.ledger import LedgerRecord
from slurmrl.errors import EnvironmentFailure
from slurmrl.paths import RunPaths
from slurmrl.rollouts.sample_files import remove_settled
from slurmrl.workers.master.task_attempts import AttemptRecord, RolloutsRecord, parse_name

logger = log.get(__name__)


@dataclass(frozen=True)
class _Visit:
    """An attempt, and those of its files that a commit needs."""

    attempt: AttemptRecord
    needed: frozenset[str]


class SampleSweep:
    """Visits the attempts of the newest commit, one at a look."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._visits: list[_Visit] = []

    def plan(self, rollouts: RolloutsRecord, ledger: LedgerRecord) -> None:
        """Begin anew, after a commit that holds these."""
        needed: dict[str, set[str]] = {}
        for sample in ledger.samples:
            needed.setdefault(sample.task, set()).add(sample.file)
        self._visits = [
            _Visit(attempt, frozenset(needed.get(attempt.name, ())))
            for attempt in reversed(rollouts.attempts)
            if attempt.over or attempt.last_file is not None
        ]

    def look(self) -> None:
        """Visit the next attempt: remove the files that the commit has no need of, or the whole
        directory of one that is over. What fails is tried again after the next commit."""
        if not self._visits:
            return
        visit = self._visits.pop()
        attempt = visit.attempt
        place = parse_name(attempt.name)
        if attempt.over and not visit.needed:
            shutil.rmtree(self._paths.rollout_task(*place), ignore_errors=True)
            return
        newest = None if attempt.over else attempt.last_file
        try:
            remove_settled(self._paths.rollout_samples(*place), visit.needed, newest)
        except EnvironmentFailure as error:
            logger.warning("cannot remove old samples of %s: %s", attempt.name, error)
