"""The scores of the items of evaluations during training: a file for each evaluation."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from slurmrl.algorithms.offline.estimates import summarize
from slurmrl.config.schema import WHOLE
from slurmrl.errors import EnvironmentFailure, UsageError
from slurmrl.fsio.atomic import (
    list_names,
    make_private_directory,
    remove,
    replace_by_parts,
    sweep_temporaries,
)
from slurmrl.fsio.failures import corrupt
from slurmrl.graph.call import Record
from slurmrl.paths import EVALUATION, RunPaths
from slurmrl.plan.settings import Settings
from slurmrl.workers.master.results import summary_text
from slurmrl.workers.parts import read_parts

_FILE: Final = re.compile(r"step-(\d+)(?:\..+)?\.json")

ITEM: Final = "id"
"""What every call says about an item: which one it is."""


class ScoringCall(NamedTuple):
    """A call that gave scores, and the part files that have them."""

    name: str
    prefix: str
    numbers: Sequence[int]


class EvaluationScores:
    """Ranks write the scores of an evaluation to part files. The master makes one file of those of
    each suite before it records the metrics of the step, and so before the commit of that step.

    ``check`` raises once a newer incarnation has begun.
    """

    def __init__(self, paths: RunPaths, settings: Settings, check: Callable[[], object]) -> None:
        self._paths = paths
        self._settings = settings
        self._check = check

    def restart(self, last_step: int) -> None:
        """Remove the files of steps after the commit that an incarnation continues from, what
        interrupted evaluations have left, and what `keep` did not. Raises EnvironmentFailure.

        The folder of part files is made here and stays: an NFS client that has found it missing may
        believe so for a minute after a rank on another host has made it."""
        if self._settings.config.evaluation is not None:
            make_private_directory(self._paths.parts)
        for name in _names(self._paths.parts):
            if name.startswith(EVALUATION):
                remove(self._paths.parts / name)
        for folder in (self._paths.parts, self._paths.evaluations):
            if folder.is_dir():
                sweep_temporaries(folder)
        for step in self._steps():
            if step > last_step:
                self._remove_step(step)
        self.keep(last_step)

    def write(
        self, step: int, items: int, calls: Sequence[ScoringCall], suite: str = WHOLE
    ) -> dict[str, float]:
        """Write the file of the evaluation of a suite with ``items`` items, and remove its part
        files. Return the estimates and the ends of their intervals.

        Raises CorruptFileError for part files that are missing or damaged, UsageError for scores
        that cannot be measured, or that two calls give, EnvironmentFailure, StaleIncarnationError,
        TrialEndedError.
        """
        if not calls:
            return {}
        lines = [self._read(call, items) for call in calls]
        scores = [_merged(calls, records) for records in zip(*lines, strict=True)]
        algorithm, config = self._settings.algorithm, self._settings.config.evaluations[suite]
        summary = summarize(scores, algorithm.evaluation_measures(config))
        self._check()
        make_private_directory(self._paths.evaluations)
        text = summary_text(self._head(step, suite), summary)
        replace_by_parts(self._paths.evaluation(step, suite), text)
        self._remove(calls)
        return summary.metrics

    def keep(self, committed: int) -> None:
        """Remove all but the newest ``evaluation.keep_last`` files of steps up to the last commit.
        Later ones do not count: the next incarnation removes them. Raises EnvironmentFailure."""
        evaluation = self._settings.config.evaluation
        if evaluation is None or evaluation.keep_last is None:
            return
        for step in [step for step in self._steps() if step <= committed][: -evaluation.keep_last]:
            self._remove_step(step)

    def _remove_step(self, step: int) -> None:
        for suite in self._settings.config.evaluations:
            remove(self._paths.evaluation(step, suite))

    def _read(self, call: ScoringCall, items: int) -> list[Record]:
        """Raises CorruptFileError, EnvironmentFailure."""
        records = read_parts(self._paths, call.prefix, call.numbers)
        if len(records) != items:
            problem = f"has scores of {len(records)} of {items} items"
            raise corrupt(self._paths.parts / call.prefix, problem)
        return records

    def _head(self, step: int, suite: str) -> dict[str, object]:
        config = self._settings.config.evaluations[suite]
        assert config.evaluation is not None, "one of `evaluations`"
        return {
            "version": 1,
            "trial": f"{self._paths.experiment}/{self._paths.trial}",
            "step": step,
            **({"suite": suite} if suite != WHOLE else {}),
            "evaluation": config.evaluation.model_dump(mode="json", exclude={"dataset", "suites"}),
            "dataset": config.held_out.title,
        }

    def _remove(self, calls: Sequence[ScoringCall]) -> None:
        """Remove part files. The next incarnation removes those that stay."""
        with suppress(EnvironmentFailure):
            for call in calls:
                for number in call.numbers:
                    remove(self._paths.part(call.prefix, number))

    def _steps(self) -> list[int]:
        """The steps that have files, in their order. Raises EnvironmentFailure."""
        matches = map(_FILE.fullmatch, _names(self._paths.evaluations))
        return sorted({int(match[1]) for match in matches if match})


def _names(directory: Path) -> list[str]:
    """Raises EnvironmentFailure."""
    try:
        return list_names(directory)
    except FileNotFoundError:
        return []


def _merged(calls: Sequence[ScoringCall], records: Sequence[Record]) -> Record:
    """What several calls say about an item. Raises UsageError if two of them give the same score:
    one would silently replace the other in the estimates."""
    line: dict[str, object] = {}
    givers: dict[str, str] = {}
    for call, record in zip(calls, records, strict=True):
        for score in record.keys() - {ITEM}:
            if (other := givers.setdefault(score, call.name)) != call.name:
                raise UsageError(
                    f"the calls '{other}' and '{call.name}' of the evaluation both give item "
                    f"{record.get(ITEM)!r} the score '{score}'; rename it in the records of one"
                )
        line |= record
    return line
