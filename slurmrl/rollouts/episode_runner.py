"""Runs episodes concurrently. An episode that fails affects no other episode."""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Final

from slurmrl import log
from slurmrl.config.schema import EpisodeSettings
from slurmrl.errors import EpisodeError, EpisodeLimitError, RunFailedError, UsageError
from slurmrl.rollouts.base import EpisodeItem
from slurmrl.rollouts.completions import Completions
from slurmrl.rollouts.generation.base import RolloutEngine
from slurmrl.rollouts.policy import Dialogue, Episode, EpisodeLimits, Policy, TokenSampling, Waiting
from slurmrl.rollouts.tools import Tools

logger = log.get(__name__)

MOST_LOGGED: Final = 5
"""Maximum number of failures of a call that the log shows one by one."""
MOST_SINGLE_FAILURES: Final = 8
"""Number of calls of one item in a row that may fail."""


class EpisodeRunner:
    """Runs the episodes of one rank, call by call."""

    def __init__(
        self, episode: Episode, tools: Tools, settings: EpisodeSettings, limits: EpisodeLimits
    ) -> None:
        self._episode, self._tools = episode, tools
        self._settings, self._limits = settings, limits
        self._failed_alone = 0

    async def run(
        self,
        items: Sequence[EpisodeItem],
        engine: RolloutEngine,
        dialogue: Dialogue,
        sampling: Callable[[EpisodeItem], TokenSampling],
        waiting: Waiting,
        *,
        slots: asyncio.Semaphore | None = None,
    ) -> list[Completions]:
        """The outcomes of the items' episodes, in the items' order.

        :param slots: limit of running episodes, shared by concurrent calls. The items of such a
        call are completions of one prompt, which may occasionally all fail. :raises EpisodeError:
        no episode was completed. :raises RunFailedError: the engine failed.
        """
        outcomes: dict[int, Completions] = {}
        left = deque(enumerate(items))

        async def work() -> None:
            waiting.end()
            while left:
                number, item = left.popleft()
                async with slots or nullcontext():
                    outcomes[number] = await self._one(
                        item, engine, dialogue, sampling(item), waiting
                    )

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._settings.concurrency, len(items))):
                    waiting.begin()  # until the first episode has begun
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        ordered = [outcomes[number] for number in range(len(items))]
        self._report(items, ordered, alone=slots is not None or len(ordered) == 1)
        return ordered

    async def _one(
        self,
        item: EpisodeItem,
        engine: RolloutEngine,
        dialogue: Dialogue,
        sampling: TokenSampling,
        waiting: Waiting,
    ) -> Completions:
        policy, tools, failure = None, self._tools.of_episode(), ""
        waiting.begin()
        try:
            async with asyncio.timeout(self._settings.timeout_s) as clock:
                policy = Policy(item, engine, dialogue, sampling, self._limits, waiting, clock)
                completions = await self._completed(policy, item, tools)
            if completions is None:
                raise UsageError("its prompt leaves no token for the policy")
        except RunFailedError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's episode may raise anything
            late = isinstance(error, TimeoutError) and clock.expired()
            failure = f"it took more than {self._settings.timeout_s:g} s" if late else _why(error)
            completions = Completions(item.prompt)
        finally:
            if policy is not None:
                policy.close()
        completions.failure = failure
        completions.tool_calls, completions.tool_failures = tools.calls, tools.failures
        return completions

    async def _completed(
        self, policy: Policy, item: EpisodeItem, tools: Tools
    ) -> Completions | None:
        """Return the completions; None if a limit left no turn for the policy."""
        try:
            completions = await self._episode(policy, item, tools)
        except EpisodeLimitError:
            if policy.latest is None or not policy.latest.turns:
                return None
            completions = policy.latest
        if not isinstance(completions, Completions):
            raise UsageError(f"it returned {type(completions).__name__}, not Completions")
        if not completions.turns:
            raise UsageError("it returned completions without a turn of the policy")
        completions.cut()
        completions.finished = completions.stopped and not policy.limited
        return completions

    def _report(
        self, items: Sequence[EpisodeItem], outcomes: Sequence[Completions], *, alone: bool
    ) -> None:
        """Log the failures.

        Raises EpisodeError if all episodes failed. If an item is ``alone`` in its call, this needs
        several such failures in a row.
        """
        pairs = zip(items, outcomes, strict=True)
        failed = [(item, outcome.failure) for item, outcome in pairs if outcome.failure]
        for item, failure in failed[:MOST_LOGGED]:
            logger.warning(
                "the episode of sample %s, index %d, failed: %s; it is not trained on",
                *(item.sample_id, item.index, failure),
            )
        if len(failed) > MOST_LOGGED:
            logger.warning("%d of %d episodes failed", len(failed), len(outcomes))
        if not failed or len(failed) < len(outcomes):
            self._failed_alone = 0
            return
        self._failed_alone += 1
        if not alone or self._failed_alone >= MOST_SINGLE_FAILURES:
            raise EpisodeError(
                f"all {len(outcomes)} episodes of this call failed, the last one for sample "
                f"{failed[-1][0].sample_id}: {failed[-1][1]}"
            )


def _why(error: BaseException) -> str:
    """The error, and where the episode's code raised it."""
    lines = str(error).splitlines() or [""]
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {lines[0]}{place}"
