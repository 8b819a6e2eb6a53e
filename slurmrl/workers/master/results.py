"""Results and scores that the master collects from the part files of ranks.

If the steps of a trial record results, `Results` writes one file for all committed steps, with
estimates. `EvaluationScores` writes one file for each evaluation during training. `UnscoredSteps`
ends a trial whose reward gives most completions no score.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from slurmrl.algorithms.summaries import summarize
from slurmrl.config.schema import WHOLE
from slurmrl.errors import EnvironmentFailure, RewardError, UsageError
from slurmrl.fsio.atomic import (
    list_names,
    make_private_directory,
    remove,
    replace_by_parts,
    sweep_temporaries,
)
from slurmrl.fsio.calls import corrupt
from slurmrl.plan.dataflow import Method, Record, Summary
from slurmrl.plan.metric_names import UNSCORED
from slurmrl.plan.model import Plan
from slurmrl.plan.settings import Settings
from slurmrl.run.history.slots import END_OF_DATASET
from slurmrl.run.metrics import encode, finite
from slurmrl.run.paths import EVALUATION, RunPaths, part_prefix
from slurmrl.run.samples import read_parts
from slurmrl.tensors.parallel.topology import topology_of
from slurmrl.workers.master.progress import Progress


class Results:
    """Results of steps. Each rank records a step in a part file. ``progress`` names the steps."""

    def __init__(
        self, paths: RunPaths, settings: Settings, plan: Plan, progress: Progress, incarnation: int
    ) -> None:
        self._paths = paths
        self._settings = settings
        self._progress = progress
        self._incarnation = incarnation
        self._files = files_of_step(plan)
        self._recorded = progress.ledger.trained
        """Number of items of the recorded steps."""
        self._summary: Summary | None = None

    def finish_step(self) -> None:
        """Record the part files of the last finished step, if its filter left any items."""
        items = self._progress.ledger.trained
        if self._files and items > self._recorded:
            self._progress.record(self._incarnation, self._files)
        self._recorded = items

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the whole run after its last step; {} before. Raises as `write`."""
        if not self._files or self._progress.finish_reason() is None:
            return {}
        summary = self._summarize()
        metrics = summary.metrics if summary is not None else {}
        return {f"eval/{name}": value for name, value in metrics.items()}

    def write(self) -> None:
        """Write the file of results and, if the algorithm makes one, the summary.

        Replace the files of an earlier call. Raises EnvironmentFailure, and CorruptFileError for
        missing or damaged part files.
        """
        if not self._files:
            return
        sweep_temporaries(self._paths.run)  # Killed masters may have left large temporary files.
        replace_by_parts(self._paths.results, map(encode, self._records()))
        if (summary := self._summarize()) is not None:
            replace_by_parts(self._paths.summary, summary_text(self._head(), summary))

    def remove_parts(self) -> None:
        """Remove the part files, after the history has recorded the end of the trial."""
        if self._files and self._progress.finish_reason() == END_OF_DATASET:
            shutil.rmtree(self._paths.parts, ignore_errors=True)

    def _summarize(self) -> Summary | None:
        if self._summary is None:
            algorithm, config = self._settings.algorithm, self._settings.config
            self._summary = algorithm.summarize(config, self._records())
        return self._summary

    def _head(self) -> dict[str, Any]:
        """Return the fields that identify the subject of the summary."""
        return {
            "version": 1,
            "trial": f"{self._paths.experiment}/{self._paths.trial}",
            "algorithm": self._settings.config.algorithm,
            "model": self._settings.config.actor.path,
            "dataset": self._settings.config.dataset.title,
        }

    def _records(self) -> Iterator[Record]:
        """Yield the records of all steps, each step in the order of its batch."""
        count = 0
        for steps in self._progress.recorded:
            for step in range(steps.first, steps.last + 1):
                prefix = part_prefix(step, steps.incarnation)
                for record in read_parts(self._paths, prefix, range(steps.files)):
                    count += 1
                    yield record
        if count != (items := self._progress.ledger.trained):
            problem = f"hold {count} lines, expected {items}, one for each item"
            raise corrupt(self._paths.parts, problem)


def summary_text(head: Mapping[str, Any], summary: Summary) -> Iterator[bytes]:
    """Yield the parts of a JSON object that begins with ``head`` and has one line per score."""
    estimates = {name: each._asdict() for name, each in summary.estimates.items()}
    whole = {**head, "items": len(summary.scores), "estimates": estimates}
    yield json.dumps(finite(whole), indent=1).removesuffix("\n}").encode()
    yield b',\n "scores": [\n'
    for number, score in enumerate(summary.scores):
        yield (b",\n  " if number else b"  ") + encode(score).rstrip()
    yield b"\n ]\n}\n"


def files_of_step(plan: Plan) -> int:
    """Return the number of part files that the ranks write in a step.

    This is the number of data-parallel ranks of the recording call, or 0 without such a call.
    """
    calls = [call for call in plan.calls if call.method is Method.RECORD]
    if not calls:
        return 0
    return topology_of(plan.models[calls[0].layout or calls[0].role or "actor"]).size("dp")


_FILE: Final = re.compile(r"step-(\d+)(?:\..+)?\.json")

ITEM: Final = "id"
"""Key that identifies an item in the records of every call."""


class ScoringCall(NamedTuple):
    """A call that gave scores, and the prefix and numbers of the part files with these scores."""

    name: str
    prefix: str
    numbers: Sequence[int]


class EvaluationScores:
    """Scores that ranks write to part files in evaluations during training.

    The master joins the part files of each suite into one file before it records the metrics of the
    step and commits the step. ``check`` raises if a newer incarnation has begun.
    """

    def __init__(self, paths: RunPaths, settings: Settings, check: Callable[[], object]) -> None:
        self._paths = paths
        self._settings = settings
        self._check = check

    def restart(self, last_step: int) -> None:
        """Remove files that the commit to continue from does not need. Raises EnvironmentFailure.

        These are files of later steps, leftovers of interrupted evaluations, and files that `keep`
        could not remove.

        Also make the folder of part files before ranks write to it. An NFS client that has found
        the folder missing may report this for a minute after another host has made the folder.
        """
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
        """Write the file of the evaluation of a suite with ``items`` items; return its metrics.

        The metrics are the estimates and the bounds of their intervals. Remove the part files.

        Raises:
            CorruptFileError: a part file is missing or damaged.
            UsageError: a score cannot be measured, or two calls give the same score.
            EnvironmentFailure, StaleIncarnationError, TrialEndedError: the file cannot be written.
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
        """Keep files of the newest ``evaluation.keep_last`` committed steps; remove older files.

        Ignore files of steps after the commit. Raises EnvironmentFailure.
        """
        evaluation = self._settings.config.evaluation
        if evaluation is None or evaluation.keep_last is None:
            return
        for step in [step for step in self._steps() if step <= committed][: -evaluation.keep_last]:
            self._remove_step(step)

    def _remove_step(self, step: int) -> None:
        for suite in self._settings.config.evaluations:
            remove(self._paths.evaluation(step, suite))

    def _read(self, call: ScoringCall, items: int) -> list[Record]:
        """Read the part files of an evaluation. Raises CorruptFileError, EnvironmentFailure."""
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
        """Remove part files. If this fails, the next incarnation removes them."""
        with suppress(EnvironmentFailure):
            for call in calls:
                for number in call.numbers:
                    remove(self._paths.part(call.prefix, number))

    def _steps(self) -> list[int]:
        """Return the steps that have files, in order. Raises EnvironmentFailure."""
        matches = map(_FILE.fullmatch, _names(self._paths.evaluations))
        return sorted({int(match[1]) for match in matches if match})


def _names(directory: Path) -> list[str]:
    """Return the names in a directory; none if it is missing. Raises EnvironmentFailure."""
    try:
        return list_names(directory)
    except FileNotFoundError:
        return []


def _merged(calls: Sequence[ScoringCall], records: Sequence[Record]) -> Record:
    """Merge the records of an item from several calls.

    Raises UsageError if two calls give a score of the same name, because one score would silently
    replace the other score.
    """
    line: dict[str, object] = {}
    givers: dict[str, str] = {}
    for call, record in zip(calls, records, strict=True):
        for score in record.keys() - {ITEM}:
            if (other := givers.setdefault(score, call.name)) != call.name:
                raise UsageError(
                    f"the calls '{other}' and '{call.name}' of the evaluation both give item "
                    f"{record.get(ITEM)!r} the score '{score}'; rename it in one of them"
                )
        line |= record
    return line


MOST_SHARE: Final = 0.5
MOST_STEPS: Final = 5


class UnscoredSteps:
    """Counter of consecutive steps in which most completions have no score."""

    def __init__(self) -> None:
        self._steps = 0

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a step. Raises RewardError after `MOST_STEPS` such steps in a row."""
        share = metrics.get(UNSCORED, 0.0)
        self._steps = self._steps + 1 if share > MOST_SHARE else 0
        if self._steps >= MOST_STEPS:
            raise RewardError(
                f"the reward gave no score to {share:.0%} of the completions of this step, and to "
                f"most completions of the {MOST_STEPS - 1} steps before; see the workers' logs. "
                "Completions without a score are not trained on: fix the reward or its "
                "dependencies, or give such completions a score (reward.pool.unjudged_score)"
            )
