"""Checks of `rollout.episode`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from slurmrl.config.schema import EpisodeSettings
from slurmrl.config.schema.episode import OWN
from slurmrl.config.source import KeyPath
from slurmrl.errors import Problem
from slurmrl.plan.checks.draft import Draft
from slurmrl.registry import near, resolve

ROLLOUTS: Final = "slurmrl.rollouts"
"""Tables in a layer above the plan, so they are resolved by name."""
SECTION: Final = ("rollout", "episode")
TOOL_CALLS: Final = "tools"
"""The environment that needs tools."""


def episodes(draft: Draft) -> Iterator[Problem]:
    """Names are known, and what an episode needs is there."""
    settings = draft.config.rollout.episode
    if not settings.has_turns:
        return
    yield from _unknown_names(draft, settings)
    environment = settings.environment
    if environment is not None and environment.name == TOOL_CALLS and not settings.tools:
        known = sorted(resolve(f"{ROLLOUTS}:TOOLS"))
        message = f"is required with environment '{TOOL_CALLS}': {{{known[0]}: {{}}}}; allowed: "
        yield draft.problem((*SECTION, "tools"), f"{message}{', '.join(known)}, or module:name")
    if environment is not None and environment.name in resolve(f"{ROLLOUTS}:WITHOUT_REWARD"):
        judges = any("rewards" in call.outputs for call in draft.algorithm.calls(draft.config))
        if draft.config.reward is None and judges:
            message = f"is required: environment '{environment.name}' gives no rewards"
            yield draft.problem(("reward",), message)


def _unknown_names(draft: Draft, settings: EpisodeSettings) -> Iterator[Problem]:
    named: list[tuple[KeyPath, str, str]] = [((*SECTION, "name"), settings.name, "EPISODES")]
    if settings.environment is not None:
        key = (*SECTION, "environment", "name")
        named.append((key, settings.environment.name, "ENVIRONMENTS"))
    for name, tool in settings.tools.items():
        where = (*SECTION, "tools", name, *(("name",) if tool.name else ()))
        named.append((where, tool.name or name, "TOOLS"))
    for where, name, table in named:
        known = sorted(resolve(f"{ROLLOUTS}:{table}"))
        if name not in known and not OWN.fullmatch(name):
            message = f"'{name}' is not allowed; {near(name, known)}, or module:name of your own"
            yield draft.problem(where, message)
