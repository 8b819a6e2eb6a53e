"""The built-in episodes, the construction of the configured episode, and the runner of episodes.

Episodes run concurrently. An episode that fails affects no other episode. Torch-free.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, cast

from slurmrl import log
from slurmrl.config.schema import EnvironmentChoice, EpisodeSettings
from slurmrl.errors import EpisodeError, EpisodeLimitError, RunFailedError, UsageError
from slurmrl.registry import construct
from slurmrl.rollouts import ENVIRONMENTS, EPISODES
from slurmrl.rollouts.base import Environment, EpisodeItem
from slurmrl.rollouts.completions import Completion
from slurmrl.rollouts.generation.base import RolloutEngine
from slurmrl.rollouts.policy import Dialogue, Episode, EpisodeLimits, Policy, TokenSampling, Waiting
from slurmrl.rollouts.tools import Tools

logger = log.get(__name__)

MOST_LOGGED: Final = 5
"""Maximum number of failures of a call that are logged one by one."""
MOST_SINGLE_FAILURES: Final = 8
"""Number of failed calls in a row, each for one item, after which an error is raised."""
_EXAMPLE = EpisodeItem(
    sample_id="example@0",
    index=0,
    prompt=(0,),
    text="",
    answer="",
    row={},
    step=1,
    evaluation=False,
)


class SingleTurn(Episode):
    """Episode of one turn."""

    async def __call__(self, policy: Policy, item: EpisodeItem, tools: Tools) -> Completion:
        completions = Completion(item.prompt)
        await policy(completions)
        return completions


class MultiTurn(Episode):
    """Episode in which an environment answers the policy's turns.

    The environment or a limit ends the episode. A turn that reaches `rollout.max_new_tokens` also
    ends the episode, because the turn is incomplete.
    """

    def __init__(self, environment: Callable[[EpisodeItem, Tools], Environment]) -> None:
        self._environment = environment

    async def __call__(self, policy: Policy, item: EpisodeItem, tools: Tools) -> Completion:
        environment = self._environment(item, tools)
        completions = Completion(item.prompt)
        while True:
            turn = await policy(completions)
            if not turn.stopped:
                return completions
            reply = await environment.step(turn)
            completions.reward(reply.reward)
            if reply.done:
                return completions
            policy.say(completions, reply.text, reply.role)


def make_episode(settings: EpisodeSettings, tools: Tools) -> Episode:
    """Make the configured episode.

    :raises UsageError: an unknown name, an object that is no episode or environment, or unsuitable
        options.
    :raises UnreadableInputError: the module of a user's own code cannot be imported.
    """
    if settings.environment is not None:
        return MultiTurn(
            _environment(settings.environment.name, settings.environment.options, tools)
        )
    kind, options = EPISODES.find(settings.name), settings.options
    if inspect.isclass(kind):
        kind, options = construct("episode", settings.name, kind, options), {}
    return cast(Episode, _accepting("episode", settings.name, kind, 3, options))


def message_role(environment: EnvironmentChoice) -> str:
    """Return the role of the messages that a built-in environment writes."""
    default = "tool" if environment.name == "tools" else "user"
    return str(environment.options.get("role", default))


def _environment(
    name: str, options: Mapping[str, Any], tools: Tools
) -> Callable[[EpisodeItem, Tools], Environment]:
    kind = ENVIRONMENTS.find(name)
    make = _accepting("environment", name, kind, 2, options)
    if not inspect.isclass(kind) or not hasattr(kind, "step"):
        raise UsageError(f"environment '{name}' is not a class with a method step")
    if ":" not in name:  # constructors of built-in classes check their options
        make(_EXAMPLE, tools)
    return make  # type: ignore[no-any-return]


def _accepting(what: str, name: str, kind: Any, arguments: int, options: Mapping[str, Any]) -> Any:
    """Bind a function's or class's options. Raises UsageError if the parameters do not fit."""
    if not callable(kind):
        raise UsageError(f"{what} '{name}' is {type(kind).__name__}, not a function or a class")
    try:
        inspect.signature(kind).bind(*(None,) * arguments, **options)
    except TypeError as error:
        names = {"episode": "policy, item, tools", "environment": "item, tools"}[what]
        given = "".join(f", {key}=…" for key in options)
        raise UsageError(f"{what} '{name}' is called with ({names}{given}): {error}") from error
    return partial(kind, **options)


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
    ) -> list[Completion]:
        """Run the episodes of the items; return their completions in the items' order.

        :param slots: limit of running episodes that concurrent calls share. Each of these calls has
        completions of one prompt, which may occasionally all fail. :raises EpisodeError: no episode
        was completed. :raises RunFailedError: the engine failed.
        """
        outcomes: dict[int, Completion] = {}
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
                    waiting.begin()  # Count as busy until `work` begins.
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
    ) -> Completion:
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
            completions = Completion(item.prompt)
        finally:
            if policy is not None:
                policy.close()
        completions.failure = failure
        completions.tool_calls, completions.tool_failures = tools.calls, tools.failures
        return completions

    async def _completed(
        self, policy: Policy, item: EpisodeItem, tools: Tools
    ) -> Completion | None:
        """Return an episode's completion; None if a limit left no turn for the policy."""
        try:
            completions = await self._episode(policy, item, tools)
        except EpisodeLimitError:
            if policy.latest is None or not policy.latest.turns:
                return None
            completions = policy.latest
        if not isinstance(completions, Completion):
            raise UsageError(f"it returned {type(completions).__name__}, not Completions")
        if not completions.prompt:
            raise UsageError("it returned a turn, not Completions with the prompt and all turns")
        if not completions.turns:
            raise UsageError("it returned completions without a turn of the policy")
        completions.cut()
        completions.finished = completions.stopped and not policy.limited
        return completions

    def _report(
        self, items: Sequence[EpisodeItem], outcomes: Sequence[Completion], *, alone: bool
    ) -> None:
        """Log the failures of a call.

        Raises EpisodeError if all episodes failed. A call for one item or prompt (``alone``) raises
        only after `MOST_SINGLE_FAILURES` such failures in a row.
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
    """Return an error's type and first line, and the place in the code that raised it."""
    lines = str(error).splitlines() or [""]
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {lines[0]}{place}"
