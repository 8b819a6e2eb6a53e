"""The results of a trial whose steps record: one file from the part files of all committed steps,
and what its lines amount to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from slurmrl.fsio.atomic import replace_by_parts, sweep_temporaries
from slurmrl.fsio.failures import corrupt
from slurmrl.graph.call import Method, Record, Summary
from slurmrl.history.record import END_OF_DATASET
from slurmrl.monitor.metrics import encode, finite
from slurmrl.parallel.topology import topology_of
from slurmrl.paths import RunPaths, part_prefix
from slurmrl.plan.model import Plan
from slurmrl.plan.settings import Settings
from slurmrl.workers.master.progress import Progress
from slurmrl.workers.parts import read_parts


class Results:
    """Part files hold the lines of one step and rank. ``progress`` names those of each step."""

    def __init__(
        self, paths: RunPaths, settings: Settings, plan: Plan, progress: Progress, incarnation: int
    ) -> None:
        self._paths = paths
        self._settings = settings
        self._progress = progress
        self._incarnation = incarnation
        self._files = files_of_step(plan)
        self._recorded = progress.ledger.trained
        """Items of the recorded steps."""
        self._summary: Summary | None = None

    def finish_step(self) -> None:
        """Count the part files of the step that was finished last. (There are none if a filter left
        it without items.)"""
        items = self._progress.ledger.trained
        if self._files and items > self._recorded:
            self._progress.record(self._incarnation, self._files)
        self._recorded = items

    def metrics(self) -> dict[str, float]:
        """After the last step: the metrics of the whole run. Raises as `write`."""
        if not self._files or self._progress.finish_reason() is None:
            return {}
        summary = self._summarize()
        metrics = summary.metrics if summary is not None else {}
        return {f"eval/{name}": value for name, value in metrics.items()}

    def write(self) -> None:
        """Write the file of results and, if the algorithm has one, their summary: those of an
        earlier call are replaced.

        Raises CorruptFileError for part files that are missing or damaged, EnvironmentFailure.
        """
        if not self._files:
            return
        sweep_temporaries(self._paths.run)  # a killed master's copy may be large
        replace_by_parts(self._paths.results, map(encode, self._records()))
        if (summary := self._summarize()) is not None:
            replace_by_parts(self._paths.summary, summary_text(self._head(), summary))

    def remove_parts(self) -> None:
        """Remove the part files, once the history says that the trial is finished for good."""
        if self._files and self._progress.finish_reason() == END_OF_DATASET:
            shutil.rmtree(self._paths.parts, ignore_errors=True)

    def _summarize(self) -> Summary | None:
        if self._summary is None:
            algorithm, config = self._settings.algorithm, self._settings.config
            self._summary = algorithm.summarize(config, self._records())
        return self._summary

    def _head(self) -> dict[str, Any]:
        """What the summary is about."""
        return {
            "version": 1,
            "trial": f"{self._paths.experiment}/{self._paths.trial}",
            "algorithm": self._settings.config.algorithm,
            "model": self._settings.config.actor.path,
            "dataset": self._settings.config.dataset.title,
        }

    def _records(self) -> Iterator[Record]:
        """The lines of all steps, each step's in the order of its batch."""
        count = 0
        for steps in self._progress.recorded:
            for step in range(steps.first, steps.last + 1):
                prefix = part_prefix(step, steps.incarnation)
                for record in read_parts(self._paths, prefix, range(steps.files)):
                    count += 1
                    yield record
        if count != (items := self._progress.ledger.trained):
            problem = f"hold {count} lines, expected one for each of {items} items"
            raise corrupt(self._paths.parts, problem)


def summary_text(head: Mapping[str, Any], summary: Summary) -> Iterator[bytes]:
    """One JSON object that begins with ``head``, with the score of each item on a line of its
    own."""
    estimates = {name: each._asdict() for name, each in summary.estimates.items()}
    whole = {**head, "items": len(summary.scores), "estimates": estimates}
    yield json.dumps(finite(whole), indent=1).removesuffix("\n}").encode()
    yield b',\n "scores": [\n'
    for number, score in enumerate(summary.scores):
        yield (b",\n  " if number else b"  ") + encode(score).rstrip()
    yield b"\n ]\n}\n"


def files_of_step(plan: Plan) -> int:
    """The number of part files that the ranks write in a step: one for each share of the items of
    the call that records; 0 without such a call."""
    calls = [call for call in plan.calls if call.method is Method.RECORD]
    if not calls:
        return 0
    return topology_of(plan.models[calls[0].layout or calls[0].role or "actor"]).size("dp")
