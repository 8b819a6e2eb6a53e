"""Makes the samples of an item: what the trainers' generate call would draw for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.rollout.configured import ConfiguredEpisodes, episode_items
from slurmrl.data.sample import SequenceSample
from slurmrl.engines.rollout.base import RolloutEngine
from slurmrl.rollouts.policy import Waiting
from slurmrl.rollouts.sample_group import SampleGroup
from slurmrl.rollouts.tools.toolbox import in_thread
from slurmrl.workers.rollout.rows import TaskRows
from slurmrl.workers.rollout_messages import RequestedItem


class Generation:
    """Runs the configured episodes of items on one engine. Holds their tools until it is closed."""

    def __init__(self, rows: TaskRows, call: CallContext, engine: RolloutEngine) -> None:
        """``call``: of any step. Made in a running asyncio loop."""
        self._settings, self._rows, self._call = call.settings, rows, call
        self._engine = engine
        self._episodes = ConfiguredEpisodes(self._settings.config)
        self._slots = asyncio.Semaphore(self._settings.config.rollout.episode.concurrency)
        self.counts = {"tokens": 0.0, "items": 0.0, "episodes_failed": 0.0}
        """Sums over all items: tokens that were drawn, items, episodes."""

    @property
    def items_at_a_time(self) -> int:
        """Items whose episodes fill the engine, and one that follows them."""
        rollout = self._settings.config.rollout
        return -(-rollout.episode.concurrency // rollout.n) + 1

    async def group(self, lease: str, row: RequestedItem, held: str) -> SampleGroup:
        """All completions of an item. ``held``: the version that the task has as they begin.

        Raises RunFailedError if the engine is lost, EpisodeError if all episodes of several items
        in a row have failed, CorruptFileError and EnvironmentFailure for a row that cannot be read.
        """
        sample: SequenceSample = await in_thread(lambda: self._rows.sample(row))
        context = self._context(row)
        outcomes = await self._episodes.run(
            self._engine, episode_items(sample, context), context, Waiting(), slots=self._slots
        )
        self.counts["tokens"] += sum(sum(one.completions.written) for one in outcomes)
        self.counts["items"] += 1
        self.counts["episodes_failed"] += sum(bool(outcome.failure) for outcome in outcomes)
        return SampleGroup.of(row.item, lease, outcomes, held)

    def close(self) -> None:
        self._episodes.close()

    def _context(self, row: RequestedItem) -> CallContext:
        """That of the step that trains the item if the trainers never wait for samples."""
        step = row.item // self._settings.algorithm.batch_size + 1
        return replace(self._call, step=step)
