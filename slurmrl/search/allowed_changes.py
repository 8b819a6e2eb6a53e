"""Search with changes of the result of training: only changes that the user allows.

Each set of allowed changes makes a new configuration, which the plan checks. The search then runs
on it as on the given one, so the defaults that follow from a change count as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final, NamedTuple, TypeAlias

from slurmrl.config.schema import role_key
from slurmrl.config.source import dotted, flat
from slurmrl.errors import ConfigError, UsageError
from slurmrl.plan.algorithms import uses_of
from slurmrl.plan.engine_rules import can
from slurmrl.plan.settings import Settings
from slurmrl.registry import near
from slurmrl.search.best_layouts import Answer, SearchRequest
from slurmrl.search.best_layouts import search as search_layouts

STALENESS: Final = "staleness"
"""Rollout tasks generate during training, so completions may be one step old."""
PRECISION: Final = "precision"
"""Models that compute in float32 compute in bfloat16."""
CHANGES: Final = (PRECISION, STALENESS)
MOST_REASONS: Final = 3
"""Reasons that are named for a change without an answer."""
BFLOAT16: Final = "bfloat16"
MAX_STALENESS: Final = "rollout.tasks.max_staleness"
Load: TypeAlias = Callable[[Mapping[str, Any]], Settings]
"""Load the configuration with overrides; raise ConfigError if it cannot be submitted with them."""


def named_changes(text: str | None) -> list[str]:
    """Return the names in a list with commas; none without a value. Raises UsageError."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    if text is not None and not names:
        raise UsageError(f"--allow names no change; allowed: {', '.join(CHANGES)}")
    for name in names:
        if name not in CHANGES:
            raise UsageError(f"--allow: no change '{name}'; {near(name, list(CHANGES))}")
    return names


class LearnedChange(NamedTuple):
    """A change of a configuration."""

    settings: Mapping[str, Any]
    """All its settings, by dotted key."""
    names: Mapping[str, str]
    """The settings that change the result of training, with the name of the change."""

    @classmethod
    def together(cls, changes: Iterable[LearnedChange]) -> LearnedChange:
        """Return one change that makes all ``changes``."""
        settings, names = dict[str, Any](), dict[str, str]()
        for one in changes:
            settings |= one.settings
            names |= one.names
        return cls(settings, names)


@dataclass(frozen=True)
class Searched:
    """The best combinations, and the allowed changes that are not among them."""

    answers: Sequence[Answer]
    unchanged: Answer | None = None
    """The best answer with the same result of training; None if none fits."""
    refused: Sequence[str] = ()
    """Changes without an answer, each with the reason."""


def search(
    checked: Settings,
    request: SearchRequest,
    plan: Load,
    submit: Load,
    allowed: Iterable[str] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> Searched:
    """Return the best combinations with and without the allowed changes.

    ``plan`` and ``submit`` load the configuration with overrides, and raise ConfigError if it is
    invalid. ``submit`` also raises it if the trial cannot be submitted, for example because it
    does not fit into memory. ``allowed`` has names of `CHANGES`.

    Raises UsageError if seconds cannot be predicted.
    """
    answers = search_layouts(checked, request, _CountingLoad(submit, {}), progress)
    unchanged = answers[0] if answers else None
    refused: list[str] = []
    possible: dict[str, LearnedChange] = {}
    for name in CHANGES:
        if name not in allowed:
            continue
        change = _change(checked, name, request.engines)
        if isinstance(change, str):
            refused.append(f"{name}: {change}")
        else:
            possible[name] = change
    tried: list[tuple[tuple[str, ...], LearnedChange, _CountingLoad]] = []
    for names in _sets(possible):
        made = LearnedChange.together([possible[name] for name in names])
        loader = _CountingLoad(submit, made.settings)
        if (changed := _CountingLoad(plan, made.settings, loader.reasons)({})) is not None:
            known = answers
            found = search_layouts(changed, request, loader, progress, known)
            follows = tuple(_consequences(checked, changed))
            answers = [_marked(one, known, made, follows) for one in found]
        tried.append((names, made, loader))
    for names, made, loader in tried:
        if any(one.learned == made.names for one in answers):
            continue
        if loader.accepted or (answers and not loader.reasons):
            reasons = [f"not among the best {request.results}"]
        else:
            reasons = list(dict.fromkeys(loader.reasons))[:MOST_REASONS]
        refused += [
            f"{' and '.join(names)}: {reason}"
            for reason in reasons or ["no combination fits into the GPUs"]
        ]
    return Searched(answers, unchanged, refused)


def _marked(
    one: Answer, known: Sequence[Answer], made: LearnedChange, follows: tuple[str, ...]
) -> Answer:
    """Return an answer of a changed configuration as an answer of the given one."""
    if any(one is other for other in known):
        return one
    overrides = {**made.settings, **one.overrides}
    return replace(one, overrides=overrides, learned=made.names, follows=follows)


def _sets(names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield all sets of at least one name, the smaller first."""
    listed = list(names)
    for size in range(1, len(listed) + 1):
        yield from combinations(listed, size)


def _change(checked: Settings, name: str, engines: Iterable[str]) -> LearnedChange | str:
    """Return a change of the configuration, or why the configuration has it already.

    New rollout tasks use one of the ``engines``, unless the configuration names another one.
    """
    config = checked.config
    if name == STALENESS:
        tasks = config.rollout.tasks
        if tasks is not None and tasks.max_staleness:
            return (
                f"rollout.tasks.max_staleness is {tasks.max_staleness} already, and a larger one "
                "changes no predicted seconds (slurmrl simulate shows its effect)"
            )
        made: dict[str, Any] = {MAX_STALENESS: 1}
        if tasks is None and config.rollout.gpus.strip():
            made["rollout.gpus"] = ""
        if tasks is None and config.rollout.offload is not None:
            made["rollout.offload"] = None
        serving = sorted(engine for engine in engines if can(engine, "rollouts"))
        if serving and not config.rollout.backend:
            made["rollout.backend"] = f"{serving[0]}:d1"
        return LearnedChange(made, {MAX_STALENESS: name})
    roles = dict.fromkeys(["actor", *(use.role for use in uses_of(config, checked.algorithm))])
    wide = [
        f"{dotted(role_key(role))}.dtype"
        for role in roles
        if config.model(role).dtype != BFLOAT16
        and (role == "actor" or checked.source.writes(*role_key(role), "dtype"))
    ]
    if not wide:
        return "all models compute in bfloat16 already"
    return LearnedChange(dict.fromkeys(wide, BFLOAT16), dict.fromkeys(wide, name))


class _CountingLoad:
    """Loads a configuration with overrides; counts successes and keeps reasons of rejections."""

    def __init__(
        self, load: Load, given: Mapping[str, Any], reasons: list[str] | None = None
    ) -> None:
        self._load, self._given = load, given
        self.accepted = 0
        self.reasons = [] if reasons is None else reasons

    def __call__(self, more: Mapping[str, Any]) -> Settings | None:
        try:
            found = self._load({**self._given, **more})
        except ConfigError as error:
            first = error.problems[0]
            self.reasons.append(f"{first.key}: {first.message}" if first.key else first.message)
            return None
        self.accepted += 1
        return found


def _consequences(before: Settings, after: Settings) -> Iterator[str]:
    """Yield the settings of the algorithm whose defaults follow from a change."""
    old, new = flat(before.config.algorithm), flat(after.config.algorithm)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield f"algorithm.{key}={new.get(key)} instead of {old.get(key)}"
