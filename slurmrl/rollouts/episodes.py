"""The built-in episodes, and the construction of the configured episode. Torch-free."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from slurmrl.config.schema import EnvironmentChoice, EpisodeSettings
from slurmrl.errors import UsageError
from slurmrl.registry import Registry, import_own
from slurmrl.rollouts import ENVIRONMENTS, EPISODES
from slurmrl.rollouts.base import Environment, EpisodeItem
from slurmrl.rollouts.completions import Completions
from slurmrl.rollouts.policy import Episode, Policy
from slurmrl.rollouts.tools import Tools

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
    """One turn."""

    async def __call__(self, policy: Policy, item: EpisodeItem, tools: Tools) -> Completions:
        completions = Completions(item.prompt)
        await policy(completions)
        return completions


class MultiTurn(Episode):
    """Turns that an environment answers, until it or a limit ends the episode.

    A turn that is cut off at `rollout.max_new_tokens` also ends it, because it is incomplete.
    """

    def __init__(self, environment: Callable[[EpisodeItem, Tools], Environment]) -> None:
        self._environment = environment

    async def __call__(self, policy: Policy, item: EpisodeItem, tools: Tools) -> Completions:
        environment = self._environment(item, tools)
        completions = Completions(item.prompt)
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

    :raises UsageError: an unknown name, an object that is no episode or environment, or options
        that it rejects.
    :raises UnreadableInputError: the module of a user's own cannot be imported.
    """
    if settings.environment is not None:
        return MultiTurn(
            _environment(settings.environment.name, settings.environment.options, tools)
        )
    kind = _named("episode", EPISODES, settings.name)
    if inspect.isclass(kind):
        try:
            kind = kind(**settings.options)
        except TypeError as error:
            raise UsageError(
                f"episode '{settings.name}' with options {settings.options}: {error}"
            ) from error
        return cast(Episode, _accepting("episode", settings.name, kind, 3, {}))
    return cast(Episode, _accepting("episode", settings.name, kind, 3, settings.options))


def message_role(environment: EnvironmentChoice) -> str:
    """The role of the messages of a built-in environment."""
    default = "tool" if environment.name == "tools" else "user"
    return str(environment.options.get("role", default))


def _environment(
    name: str, options: Mapping[str, Any], tools: Tools
) -> Callable[[EpisodeItem, Tools], Environment]:
    kind = _named("environment", ENVIRONMENTS, name)
    make = _accepting("environment", name, kind, 2, options)
    if not inspect.isclass(kind) or not hasattr(kind, "step"):
        raise UsageError(f"environment '{name}' is not a class with a method step")
    if ":" not in name:  # constructors of built-in classes check their options
        make(_EXAMPLE, tools)
    return make  # type: ignore[no-any-return]


def _named(what: str, table: Registry, name: str) -> Any:
    return import_own(what, name) if ":" in name else table.load(name)


def _accepting(what: str, name: str, kind: Any, arguments: int, options: Mapping[str, Any]) -> Any:
    """Return the object with its options; reject unsuitable options or parameters."""
    if not callable(kind):
        raise UsageError(f"{what} '{name}' is {type(kind).__name__}, not a function or a class")
    try:
        inspect.signature(kind).bind(*(None,) * arguments, **options)
    except TypeError as error:
        names = {"episode": "policy, item, tools", "environment": "item, tools"}[what]
        given = "".join(f", {key}=…" for key in options)
        raise UsageError(f"{what} '{name}' is called with ({names}{given}): {error}") from error
    return partial(kind, **options)
