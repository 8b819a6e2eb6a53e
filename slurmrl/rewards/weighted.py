"""The configured reward: a weighted sum of functions, each for the rows that it is meant for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from slurmrl.config.schema import Reward, RewardPart
from slurmrl.config.schema.reward import ALONE
from slurmrl.data.fields import ABSENT, value_at
from slurmrl.errors import RewardError
from slurmrl.rewards import make
from slurmrl.rewards.judged import JudgedCompletions, added
from slurmrl.rewards.pooled import PooledReward
from slurmrl.rewards.reward import NO_EXTRAS, Extras, Stats, of_completion
from slurmrl.rewards.scores import check_sum

METRIC = "reward/"
"""With the name of a part: the mean of its scores before the weight."""
Row = Mapping[str, Any]


class Scorer(Protocol):
    """A function behind one calling convention: `CheckedReward` or `PooledReward`."""

    @property
    def needs_answers(self) -> bool: ...

    def wanted(self) -> Sequence[str]: ...

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Row],
        places: Sequence[str],
        extras: Extras = NO_EXTRAS,
    ) -> Sequence[float | None]: ...

    def check_rows(self, rows: Sequence[Row]) -> list[str]: ...

    def stats(self) -> Stats: ...

    def close(self) -> None: ...


class WeightedPart(NamedTuple):
    settings: RewardPart
    scorer: Scorer


class WeightedReward:
    """:param parts: by name; `ALONE` for a reward that is not a sum, which has no metric of its
    own."""

    def __init__(self, parts: Mapping[str, WeightedPart]) -> None:
        self._parts = dict(parts)
        self._stats: Stats = {}
        self._scores: list[dict[str, float]] = []

    @property
    def needs_answers(self) -> bool:
        """Whether a function compares with the reference answer of the row."""
        return any(part.scorer.needs_answers for part in self._parts.values())

    def wanted(self) -> set[str]:
        """The names of the additional arguments that functions ask for. Raises as `score` does."""
        return {name for part in self._parts.values() for name in part.scorer.wanted()}

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Row],
        places: Sequence[str],
        extras: Extras = NO_EXTRAS,
    ) -> list[float | None]:
        """One finite score per completion; see `CheckedReward.score`. None where a part with a
        weight could not judge the completion.

        :raises RewardError: besides, the sum for a completion is too large.
        """
        self._stats, self._scores = {}, [{} for _ in completions]
        for row, place in zip(rows, places, strict=True):
            if problem := self._judged_by_none(row):
                raise RewardError(f"{place}: {problem}")
        totals = [0.0] * len(completions)
        unscored: set[int] = set()
        terms: list[list[str]] = [[] for _ in completions]
        for name, (settings, scorer) in self._parts.items():
            chosen = [index for index, row in enumerate(rows) if applies(settings, row)]
            if not chosen:
                continue
            scores = scorer.score(
                [prompts[index] for index in chosen],
                [completions[index] for index in chosen],
                [rows[index] for index in chosen],
                [places[index] for index in chosen],
                of_completion(extras, chosen),
            )
            for index, score in zip(chosen, scores, strict=True):
                if score is None:
                    unscored |= {index} if settings.weight else set()
                    continue
                totals[index] += settings.weight * score
                if name != ALONE:
                    self._scores[index][name] = score
                terms[index].append(f"{settings.weight:g} * {score:g} ({name or settings.name})")
            self._stats = added([self._stats, scorer.stats()])
        for total, place, summands in zip(totals, places, terms, strict=True):
            check_sum(total, place, " + ".join(summands))
        return [None if index in unscored else total for index, total in enumerate(totals)]

    def check_rows(self, rows: Sequence[Row]) -> list[str]:
        """The reason why each row cannot be judged, "" if it can (see `RewardFunction`)."""
        problems = [self._judged_by_none(row) for row in rows]
        for settings, scorer in self._parts.values():
            chosen = [index for index, row in enumerate(rows) if applies(settings, row)]
            refused = scorer.check_rows([rows[index] for index in chosen])
            for index, problem in zip(chosen, refused, strict=True):
                problems[index] = problems[index] or problem
        return problems

    def judge(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        rows: Sequence[Row],
        places: Sequence[str],
        extras: Extras = NO_EXTRAS,
    ) -> JudgedCompletions:
        """`score` with all that it found. Raises as it does."""
        scores = self.score(prompts, completions, rows, places, extras)
        return JudgedCompletions(scores=tuple(scores), parts=tuple(self._scores), stats=self._stats)

    def stats(self) -> Stats:
        """Additional metrics of the latest call: name to (sum, count)."""
        return added([self._stats, part_stats(self._scores)])

    def parts(self) -> list[dict[str, float]]:
        """What each part gave each completion of the latest call, before its weight; nothing for a
        reward that is not a sum."""
        return self._scores

    def close(self) -> None:
        for part in self._parts.values():
            part.scorer.close()

    def _judged_by_none(self, row: Row) -> str:
        """Why no part judges a row; "" if one does."""
        settings = [part.settings for part in self._parts.values()]
        if any(applies(each, row) for each in settings):
            return ""
        fields = dict.fromkeys(key for each in settings for key in each.where)
        values = ", ".join(f"{key}: {_shown(value_at(row, key))}" for key in fields)
        return f"no part of the reward judges this row ({values}); see reward.parts.<name>.where"


def make_reward(
    reward: Reward, *, cores: int | None = None, of_one_prompt: bool = False
) -> WeightedReward:
    """Make the configured reward. Raises as `make` does, or in its first call for functions in a
    pool.

    :param of_one_prompt: each call has the completions of one prompt alone.
    """
    cores = cores or len(os.sched_getaffinity(0))
    return WeightedReward(
        {
            name: WeightedPart(part, _scorer(part, cores, of_one_prompt))
            for name, part in reward.functions.items()
        }
    )


def _scorer(part: RewardPart, cores: int, of_one_prompt: bool) -> Scorer:
    if part.pool is not None:
        return PooledReward(part.name, part.options, part.pool, cores, of_one_prompt=of_one_prompt)
    return make(part.name, part.options, cores=cores)


def part_stats(parts: Sequence[Mapping[str, float]]) -> Stats:
    """The metrics of the parts, from what they gave each completion."""
    given: dict[str, list[float]] = {}
    for each in parts:
        for name, score in each.items():
            given.setdefault(name, []).append(score)
    return {METRIC + name: (sum(scores), float(len(scores))) for name, scores in given.items()}


def applies(settings: RewardPart, row: Row) -> bool:
    """Whether a part judges a row."""
    return all(
        any(_same(value_at(row, key), value) for value in _alternatives(wanted))
        for key, wanted in settings.where.items()
    )


def _alternatives(wanted: Any) -> Sequence[Any]:
    return wanted if isinstance(wanted, tuple) else (wanted,)


def _same(value: Any, wanted: Any) -> bool:
    """Whether two JSON values are equal; true is not 1."""
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def _shown(value: Any) -> str:
    return "absent" if value is ABSENT else repr(value)[:100]
