"""Checks of `rollout.episode`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from slurmrl.config.schema import EpisodeSettings
from slurmrl.config.schema.rollout import OWN
from slurmrl.config.source import KeyPath
from slurmrl.errors import Problem
from slurmrl.plan.checks.draft import Draft
from slurmrl.plan.estimates.hardware import GIB
from slurmrl.plan.estimates.lengths import lengths_of
from slurmrl.plan.estimates.memory import BUILT_IN, PAGE_TOKENS, kv_bytes_per_token
from slurmrl.plan.estimates.shape import shape_of
from slurmrl.plan.placement import ROLLOUTS as ROLLOUT
from slurmrl.plan.placement import model_of
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
    yield from _cache(draft, settings)
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


def _cache(draft: Draft, settings: EpisodeSettings) -> Iterator[Problem]:
    """A limited cache is that of an engine which has one, and holds the longest sequence."""
    placed = draft.placements()
    name = ROLLOUT if ROLLOUT in placed else "actor"
    if settings.cache_bytes is None or name not in placed:
        return
    where = (*SECTION, "cache_gib")
    model, allocation = model_of(draft.config, name), placed[name].allocation
    if model.implementation == "hf" or allocation.backend not in BUILT_IN:
        yield draft.problem(
            where,
            f"is not allowed with '{allocation}' and implementation {model.implementation}; it "
            "needs the built-in decoder (fsdp or native)",
        )
        return
    shape = shape_of(model)
    lengths = lengths_of(draft.config, draft.algorithm, shape)
    if shape is None or lengths is None or lengths.assumed:
        return
    tokens = -(-lengths.longest // PAGE_TOKENS) * PAGE_TOKENS
    needed = tokens * kv_bytes_per_token(shape, allocation, model.dtype)
    if settings.cache_bytes < needed:
        yield draft.problem(
            where,
            f"{settings.cache_gib:g} is not allowed: the longest sequence, {lengths.longest} "
            f"tokens, needs {needed / GIB:.3g} GiB",
        )


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
