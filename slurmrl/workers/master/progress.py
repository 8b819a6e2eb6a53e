"""Progress of a run, as in commits: step, ledger of the data, scalars, due times."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from slurmrl.algorithms.scalars import ScalarController
from slurmrl.config.schema import WHOLE, Config
from slurmrl.config.schema.config import Frequency, StopWhen
from slurmrl.data.ledger import Ledger, LedgerRecord
from slurmrl.data.order import ItemOrder, order_of
from slurmrl.data.prepared import read_manifest
from slurmrl.errors import CheckpointError, CorruptFileError, UsageError
from slurmrl.fsio import documents
from slurmrl.fsio.calls import corrupt
from slurmrl.fsio.documents import (
    COUNT,
    NUMBER,
    SIZE,
    TEXT,
    Fields,
    FieldType,
    each,
    list_of,
    table,
)
from slurmrl.plan.dataflow import Refill
from slurmrl.plan.settings import Settings
from slurmrl.registry import resolve
from slurmrl.run.history.slots import END_OF_DATASET
from slurmrl.run.metrics import finite
from slurmrl.workers.master.task_attempts import ATTEMPTS

WHERE = "the state of the last commit"


def _read_ledger(values: Mapping[str, Any]) -> LedgerRecord:
    """Read the ledger of a commit. Raises CorruptFileError."""
    record = documents.from_json(LedgerRecord, values, WHERE)
    record.check(WHERE)
    return record


def _is_ledger(value: Any) -> bool:
    try:
        return isinstance(value, dict) and bool(_read_ledger(value))
    except CorruptFileError:
        return False


@dataclass(frozen=True, kw_only=True)
class RecordedSteps:
    """Steps ``first`` to ``last``. For each step, ranks wrote ``files`` part files."""

    first: Annotated[int, COUNT]
    last: Annotated[int, COUNT]
    incarnation: Annotated[int, COUNT]
    files: Annotated[int, COUNT]


_TIMES = table({"step": COUNT, "epoch": COUNT}, ("step", "epoch"))
STATE: Fields = {
    "step": COUNT,
    "ledger": FieldType("a ledger in which no item occurs twice", _is_ledger),
    "dataset": table(
        {"size": SIZE, "fingerprint": TEXT, "sources": each(TEXT), "tokens": each(TEXT)},
        ("size", "fingerprint"),
    ),
    "metrics": each(FieldType("any value", lambda value: True)),
    "controller": each(NUMBER),
    "commits": _TIMES,
    "evaluations": _TIMES,
    "stop_token_ids": list_of(SIZE),
    "chat_template": TEXT,
    "recorded": list_of(documents.shape(RecordedSteps)),
    "rollouts": ATTEMPTS,
}
"""Fields of a committed state. ``evaluations`` is null without evaluations. `Master` adds
``rollouts`` only with rollout tasks."""
REQUIRED = ("step", "metrics", "controller", "commits")


def ledger_of(state: Mapping[str, Any]) -> LedgerRecord:
    """Return the ledger of a committed state. Raises CorruptFileError."""
    if state.get("ledger") is None:
        raise corrupt(WHERE, "has no 'ledger'")
    return _read_ledger(state["ledger"])


def frequency(section: Any, now_s: float) -> Frequency:
    """Return the frequency of a section that has the three ``every_`` settings."""
    return Frequency(section.every_steps, section.every_seconds, section.every_epochs, now_s=now_s)


class Progress:
    """Progress of a run, from step 0 or from the state of a commit."""

    def __init__(
        self, settings: Settings, state: Mapping[str, Any] | None, ledger: Ledger | None = None
    ) -> None:
        """``ledger`` replaces the plain ledger of the commit, for rollout tasks."""
        self.config: Config = settings.config
        self.batch_size: int = settings.algorithm.batch_size
        self.refill: Refill = settings.algorithm.refill()
        self.controller: ScalarController = resolve(settings.algorithm.controller())(
            settings.algorithm
        )
        now_s = time.monotonic()
        self.commits = frequency(self.config.checkpoint, now_s)
        own = self.config.trainers_evaluate
        self.evaluations = frequency(self.config.evaluation, now_s) if own else None
        self.log_lines = frequency(self.config.logging, now_s)
        self.step = 0
        self.ledger = ledger or Ledger(None if state is None else ledger_of(state))
        self.dataset: dict[str, Any] | None = None
        self.metrics: dict[str, Any] = {}
        """Metrics of the last step and its evaluation."""
        self.stop_when = StopWhen.parse(self.config.stop_when) if self.config.stop_when else None
        self.held_out: Mapping[str, int] = {}
        self.stop_token_ids: list[int] = []
        """Ids of the tokens that end a completion; exports contain them."""
        self.chat_template: str | None = None
        """Content of the file that `dataset.chat_template` names. Exports contain the template."""
        self.recorded: list[RecordedSteps] = []
        """Steps with recorded results, in order."""
        self._one_pass: bool = settings.algorithm.one_pass
        self._order: ItemOrder | None = None
        self._batch: list[int] = []
        """Numbers of the items in flight for the next step."""
        if state is not None:
            self._restore(state)

    # -- committed state ---------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state of a commit as JSON values. A resume also needs the ranks' files."""
        return {
            "step": self.step,
            "ledger": documents.to_json(self.ledger.record()),
            "dataset": self.dataset,
            "metrics": finite(self.metrics),
            "controller": self.controller.state(),
            "commits": self.commits.state(),
            "evaluations": self.evaluations.state() if self.evaluations else None,
            "stop_token_ids": self.stop_token_ids,
            "chat_template": self.chat_template,
            "recorded": [documents.to_json(steps) for steps in self.recorded],
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.dataset, self.metrics = state["dataset"], state["metrics"]
        self.stop_token_ids = state.get("stop_token_ids") or []
        self.chat_template = state.get("chat_template")
        self.commits.restore(state["commits"])
        if missing := self.controller.state().keys() - state["controller"].keys():
            raise CheckpointError(f"the committed state has no {', '.join(sorted(missing))}")
        self.controller.restore(state["controller"])
        self.recorded = [
            documents.from_json(RecordedSteps, values, WHERE)
            for values in state.get("recorded") or ()
        ]
        if self.evaluations is not None and state["evaluations"] is not None:
            self.evaluations.restore(state["evaluations"])

    # -- data --------------------------------------------------------------------------------

    def use_dataset(
        self,
        size: int,
        fingerprint: str,
        held_out: Mapping[str, int],
        directories: Sequence[Path] = (),
    ) -> None:
        """Set the dataset that the ranks have read. ``directories`` contain the prepared rows.

        ``held_out`` contains the sizes of the datasets of `Config.evaluations`. Raises UsageError
        for a changed dataset, and CorruptFileError or EnvironmentFailure for unreadable rows.
        """
        sources, tokens = self._sources(directories)
        dataset = {"size": size, "fingerprint": fingerprint, "sources": sources, "tokens": tokens}
        before = self.dataset or dataset
        again = "put the old content back and resume, or submit a new trial"
        if (before["size"], before["fingerprint"]) != (size, fingerprint):
            raise UsageError(
                f"the dataset {self._changed(before, dataset)} has changed since the last commit "
                f"({before['size']} items then, {size} now), so the order of its items cannot be "
                f"kept: {again}"
            )
        if (before.get("tokens") or tokens) != tokens:
            raise UsageError(
                f"the tokenizer or chat template of {self.config.actor.tokenizer} has changed "
                "since the last commit, or resume --update-code brought another slurmrl, so "
                f"prompts would differ: {again}. --update-code can also bring the old slurmrl back"
            )
        self.dataset = dataset
        self.held_out = held_out
        self._order = order_of(
            self.config.dataset, self.config.seed, self.batch_size, size, directories
        )

    def use_template(self, template: str | None) -> None:
        """Set the content of the template file. Raises UsageError if prompts would change."""
        if self.chat_template not in (None, template):
            raise UsageError(
                f"the chat template {self.config.dataset.chat_template} has changed since the last "
                "commit: put the old content back and resume, or submit a new trial"
            )
        self.chat_template = template

    def use_stop_tokens(self, ids: list[int], *, check: bool = True) -> None:
        """Set the tokens that end a completion. With ``check``, raise UsageError for changes."""
        before = self.stop_token_ids or ids
        if check and {*before} != {*ids}:
            raise UsageError(
                f"the tokens that end a completion have changed since the last commit (ids "
                f"{before} then, {ids} now): put the old config.json, generation_config.json and "
                "tokenizer of the actor back and resume, or submit a new trial"
            )
        self.stop_token_ids = ids

    def _sources(self, directories: Sequence[Path]) -> tuple[dict[str, str], dict[str, str]]:
        """Map the sources' names to fingerprints of their files, and to fingerprints of tokens."""
        named = zip(self.config.dataset.parts, map(read_manifest, directories), strict=False)
        known = {name: manifest for name, manifest in named if manifest is not None}
        return {n: m.source for n, m in known.items()}, {n: m.tokens for n, m in known.items()}

    def _changed(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
        """Return the changed files of a dataset, or all files if an old commit has no sources."""
        then = before.get("sources") or {}
        paths = [
            f"{part.path} (or an image or video of its rows)" if part.media_keys else part.path
            for name, part in self.config.dataset.parts.items()
            if name in then and then[name] != now["sources"].get(name)
        ]
        return ", ".join(paths) or self.config.dataset.title

    @property
    def order(self) -> ItemOrder:
        if self._order is None:
            raise RuntimeError("use_dataset comes first")
        return self._order

    @property
    def epoch(self) -> int:
        """Number of finished epochs. Their items are all trained or dropped.

        If sources have weights, an epoch has as many items as all sources have in total.
        """
        return self.ledger.settled // self.order.size

    def take_batch(self) -> list[tuple[int, int]]:
        """Take the items of the next step as (epoch, index). `advance` counts them as trained."""
        assert not self._batch, "one step at a time"
        return self.items(self.take(self.batch_size))

    def take(self, count: int) -> list[int]:
        """Take ``count`` items for the next step; return their numbers.

        `advance` counts them as trained, except items that were dropped or given back. In a single
        pass, fewer items may be left.
        """
        if self._one_pass:
            count = min(count, self.order.size - self.ledger.settled)
        taken = self.ledger.take(count, self.step + 1)
        self._batch += taken
        return taken

    def use(self, numbers: Iterable[int]) -> None:
        """Use items in flight for the next step, as if `take` had returned them."""
        self._batch += numbers

    def items(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """Return the items with these numbers as (epoch, index)."""
        return self.order.items(numbers)

    def drop(self, numbers: Collection[int], reason: str) -> None:
        """Count taken items as dropped for a reason, so that they are never trained."""
        self.ledger.drop(numbers, reason)
        self._leave(numbers)

    def give_back(self, numbers: Collection[int]) -> None:
        """Queue taken items again, in front of all items that no step has taken."""
        self.ledger.give_back(numbers)
        self._leave(numbers)

    def _leave(self, numbers: Collection[int]) -> None:
        left = set(numbers)
        self._batch = [number for number in self._batch if number not in left]

    def evaluation_items(self, suite: str = WHOLE) -> list[tuple[int, int]]:
        """Return the items of the evaluation of a suite: always the first rows of the dataset."""
        evaluation, size = self.config.evaluations[suite].evaluation, self.held_out[suite]
        assert evaluation is not None, "one of `evaluations`"
        return [(0, index) for index in range(min(evaluation.samples or size, size))]

    # -- steps -------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        return self.controller.values()

    def advance(self, metrics: Mapping[str, Any]) -> None:
        """Finish the step: count its batch as trained and update the scalars from its metrics.

        Keep the scalars if the filter left no samples to train on.
        """
        self.step += 1
        self.ledger.train(self._batch, self.step)
        if self._batch:
            self.controller.update(metrics)
        self._batch = []

    def record(self, incarnation: int, files: int) -> None:
        """Record that this incarnation has written the last finished step to part files."""
        own = incarnation, files, self.step - 1  # A step without items is not recorded.
        before = [(steps.incarnation, steps.files, steps.last) for steps in self.recorded[-1:]]
        first = self.recorded.pop().first if before == [own] else self.step
        self.recorded.append(
            RecordedSteps(first=first, last=self.step, incarnation=incarnation, files=files)
        )

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole run."""
        steps = self.known_steps
        assert steps is not None, "use_dataset comes first"
        return steps

    @property
    def known_steps(self) -> int | None:
        """Number of steps of the whole run; in a single pass, None until the dataset was read."""
        given = self.config.total_steps
        if not self._one_pass:
            assert given is not None, "checked at submission"
            return given
        if self.dataset is None:
            return None
        steps: int = -(-self.dataset["size"] // self.batch_size)
        return steps if given is None else min(given, steps)

    def finish_reason(self) -> str | None:
        """Return why the run is finished after this step, or None.

        A restart also calls this, because a run may have been killed after its last commit.
        """
        if self.stop_when is not None and self.stop_when.met(self.metrics):
            return f"stop_when: {self.stop_when}"
        if self._one_pass and self.ledger.settled >= self.order.size:
            return END_OF_DATASET
        return "total_steps" if self.step >= self.total_steps else None

    def evaluation_due(self) -> bool:
        if self.evaluations is None or self.config.evaluation is None:
            return False
        due = self.evaluations.check(self.step, self.epoch, time.monotonic())
        return due or (self.step >= self.total_steps and self.config.evaluation.at_end)

    def log_due(self) -> bool:
        return self.log_lines.check(self.step, self.epoch, time.monotonic())

    def commit_due(self) -> bool:
        return self.commits.check(self.step, self.epoch, time.monotonic())
