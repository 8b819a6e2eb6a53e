"""Generation of an item's samples. The samples equal the results of the trainers' generate call.

`TaskRows` reads the row of an item, `Generation` runs its episodes, and `Scoring` scores the
episodes in processes while the task generates other items.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from slurmrl import log
from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.rollout_calls import as_sample
from slurmrl.algorithms.rollout_sampling import ConfiguredEpisodes, episode_items
from slurmrl.algorithms.rule_reward import of_places, reward_arguments, with_tokens
from slurmrl.backoff import READ_S, retry
from slurmrl.config.schema import Dataset
from slurmrl.data import dataset, preparation
from slurmrl.data.dataset import SampleRows
from slurmrl.data.prepared import PreparedRows
from slurmrl.data.sample import SequenceSample
from slurmrl.errors import (
    EnvironmentFailure,
    RewardError,
    SlurmrlError,
    UsageError,
    WorkerDiedError,
)
from slurmrl.fsio import documents
from slurmrl.rewards.process_pool import MOST_PROCESSES, ProcessPool, Unanswered
from slurmrl.rewards.weighted import reward_program
from slurmrl.rollouts.generation.base import RolloutEngine
from slurmrl.rollouts.policy import Waiting
from slurmrl.rollouts.sample_files import SCORED, SampleGroup
from slurmrl.rollouts.tools import Job, in_thread
from slurmrl.workers.rollout.session import Key, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slurmrl.config.schema import Reward


logger = log.get(__name__)


class Generation:
    """Runs the episodes of items on one engine, and keeps their tools until it is closed."""

    def __init__(self, rows: TaskRows, call: CallContext, engine: RolloutEngine) -> None:
        """``call`` is the context of a generate call. Use this in a running asyncio loop."""
        self._settings, self._rows, self._call = call.settings, rows, call
        self._engine = engine
        self._episodes = ConfiguredEpisodes(self._settings.config)
        self._slots = asyncio.Semaphore(self._settings.config.rollout.episode.concurrency)
        self.counts = {"tokens": 0.0, "items": 0.0, "episodes_failed": 0.0}
        """Numbers of sampled tokens, finished items and failed episodes."""

    @property
    def items_at_a_time(self) -> int:
        """Number of items whose episodes fill the engine, plus one item that can begin next."""
        rollout = self._settings.config.rollout
        return -(-rollout.episode.concurrency // rollout.n) + 1

    async def group(self, key: Key, row: Row, held: str) -> SampleGroup:
        """Return all completions of an item. ``held`` is the weight version at the beginning.

        Raises:
            RunFailedError: the engine is lost.
            EpisodeError: all episodes of several items in a row have failed.
            CorruptFileError, EnvironmentFailure: the row cannot be read.
        """
        sample: SequenceSample = await in_thread(lambda: self._rows.sample(row))
        context = self._context(key[1])
        outcomes = await self._episodes.run(
            self._engine, episode_items(sample, context), context, Waiting(), slots=self._slots
        )
        self.counts["tokens"] += sum(sum(one.written) for one in outcomes)
        self.counts["items"] += 1
        self.counts["episodes_failed"] += sum(bool(outcome.failure) for outcome in outcomes)
        return SampleGroup.of(key[1], key[0], outcomes, held)

    def check_stops(self, ids: Sequence[int]) -> None:
        """Raise UsageError if the trainers end completions at other tokens than this task."""
        own = self._call.stop_token_ids
        if ids and {*ids} != {*own}:
            raise UsageError(
                f"the trainers end completions at the token ids {[*ids]}, and this task would end "
                f"them at {[*own]}: put the old config.json, generation_config.json and tokenizer "
                "of the actor back"
            )

    def close(self) -> None:
        self._episodes.close()

    def _context(self, item: int) -> CallContext:
        """Return the context of the step that would train the item if no item were dropped."""
        step = item // self._settings.algorithm.batch_size + 1
        return replace(self._call, step=step)


class TaskRows:
    """Reads rows in any number of threads.

    The first read opens the data, because the trainers have prepared all rows by then.
    """

    def __init__(self, folder: Path, config: Dataset, tokenizer: PreTrainedTokenizerBase) -> None:
        """``folder`` has the run's prepared data."""
        self._folder, self._config, self._tokenizer = folder, config, tokenizer
        self._opening = threading.Lock()
        self._opened: SampleRows | None = None

    def sample(self, row: Row) -> SequenceSample:
        """Return the row as a sample of one item.

        Raises CorruptFileError, and EnvironmentFailure if the row cannot be read for `READ_S`.
        """
        return retry("read the dataset", lambda: self._read(row), timeout_s=READ_S)

    def _read(self, row: Row) -> SequenceSample:
        with self._opening:
            if self._opened is None:
                self._opened = dataset.make(
                    self._config,
                    [
                        PreparedRows(preparation.find(self._folder, part, self._tokenizer))
                        for part in self._config.parts.values()
                    ],
                )
        return self._opened.sample([row])


UNKNOWN: Final = frozenset({"step", "model_scores"})
"""Arguments of reward functions that only the trainers can pass."""
CLOSING_S: Final = 5.0
REWARD_CLOSING_S: Final = 10.0
"""Seconds that the functions of a reward may take to release their resources."""
MOST_LATE: Final = 2
"""Number of cancelled scores after which the trainers score an item. A restart of the trainers may
cause one cancellation."""


class Scoring:
    """Scores groups in separate processes, each with the whole reward and one group at a time.

    The trainers score the groups that fail here. If the reward is the cause, the trainers get the
    same error and report it.
    """

    def __init__(
        self,
        reward: Reward,
        rows: TaskRows,
        context: CallContext,
        *,
        submission: int,
        timeout_s: float,
    ) -> None:
        """``context`` is the context of any call. ``timeout_s`` is the time limit for one group."""
        self._submission = submission
        self._rows, self._context, self._timeout_s = rows, context, timeout_s
        cores = context.cores
        own = any(part.has_processes for part in reward.functions.values())
        self._size = 1 if own else min(cores, MOST_PROCESSES)
        self._program = reward_program(reward, cores, of_groups=True, closing_s=REWARD_CLOSING_S)
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._asked = 0
        """Number of groups that wait for their scores."""
        self._left = False
        """Whether the trainers must score all groups."""
        self._late: Counter[int] = Counter()
        """Number of cancelled scores of each item."""

    async def scored(self, row: Row, group: SampleGroup) -> SampleGroup:
        """Return the group with its scores, or unchanged if the trainers must score it.

        A cancellation of this coroutine stops the reward. The trainers score an item after
        `MOST_LATE` cancellations.
        """
        if self._left:
            return group
        if self._late[group.item] >= MOST_LATE:
            text = "the trainers will score item %d, because the task did not score it in time"
            logger.warning(text, group.item)
            return group
        try:
            sample: SequenceSample = await in_thread(lambda: self._rows.sample(row))
            turns = self._context.settings.config.rollout.episode.has_turns
            made = as_sample(sample.ids, [group], turns=turns, metadata=sample.metadata)
            scored = await self._answer(reward_arguments(made, self._context))
        except asyncio.CancelledError:
            self._late[group.item] += 1
            raise
        except SlurmrlError as error:
            logger.warning("the trainers will score item %d: %s", group.item, error)
            return group
        return group.with_scores(scored)

    def close(self) -> None:
        """End the threads and their processes. Wait at most `CLOSING_S`."""
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + CLOSING_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads.clear()

    async def _answer(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scores of all completions as JSON. Raises SlurmrlError if there are none."""
        job = Job(lambda pool: self._scored(arguments, pool, job.future.cancelled))
        self._asked += 1
        try:
            if len(self._threads) < min(self._asked, self._size):
                self._threads.append(threading.Thread(target=self._serve, daemon=True))
                self._threads[-1].start()
            self._jobs.put(job)
            scored: dict[str, Any] = await job.future
            return scored
        finally:
            self._asked -= 1

    def _serve(self) -> None:
        """Run jobs in one process, which dies with the thread that started it."""
        pool = ProcessPool(self._program, self._timeout_s, 1)
        while (job := self._jobs.get()) is not None:
            job.run(pool)
        pool.close()

    def _scored(
        self, arguments: Mapping[str, Any], pool: ProcessPool, gone: Callable[[], bool]
    ) -> dict[str, Any]:
        """Return the scores of all completions. Raises SlurmrlError if there are none.

        ``gone`` returns whether the caller no longer waits for the scores.
        """
        count = len(arguments["completions"])
        scores: list[float | None] = [0.0] * count
        parts: list[Mapping[str, float]] = [{}] * count
        stats = {}
        if asked := with_tokens(arguments, range(count)):
            given = self._ask(of_places(arguments, asked), pool, gone)
            stats = given["stats"]
            for place, score, part in zip(asked, given["scores"], given["parts"], strict=True):
                scores[place], parts[place] = score, part
        found = {"scores": scores, "parts": parts, "stats": stats}
        return {**found, "submission": self._submission}

    def _ask(
        self, arguments: dict[str, Any], pool: ProcessPool, gone: Callable[[], bool]
    ) -> dict[str, Any]:
        try:
            wanted = pool.start()["wanted"]
        except (UsageError, WorkerDiedError, EnvironmentFailure):
            self._left = True
            raise
        if unknown := UNKNOWN.intersection(wanted):
            self._left = True
            raise UsageError(f"the reward asks for {min(unknown)}, which only the trainers know")
        extras = {name: arguments["extras"][name] for name in wanted}
        began = time.monotonic()
        (verdict,) = pool.ask([{**arguments, "extras": extras}], abandoned=gone)
        if isinstance(verdict, Unanswered):
            if gone():
                waited_s = time.monotonic() - began
                place = arguments["places"][0]
                logger.warning("the reward for %s was stopped after %.0f s", place, waited_s)
            raise RewardError(verdict.why)
        if "error" in verdict:
            raise RewardError(verdict["error"])
        judged: dict[str, Any] = verdict["judged"]
        documents.check(judged, SCORED, "the reply of the reward", ("scores", "parts", "stats"))
        return judged


def scoring_of(call: CallContext, rows: TaskRows, submission: int) -> Scoring | None:
    """Return the scorer of a task's groups, or None if the task does not score them.

    The task does not score if there is no reward, if the reward needs the trainers' reward model,
    or if only evaluations are scored. ``call`` is the context of a generate call.
    """
    config = call.settings.config
    if config.reward is None or config.reward.uses_model:
        return None
    if not any("rewards" in each.outputs for each in call.settings.algorithm.calls(config)):
        return None
    timeout_s = config.step_timeout_s
    return Scoring(config.reward, rows, call, submission=submission, timeout_s=timeout_s)
