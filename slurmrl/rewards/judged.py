"""What the reward gave completions, on the trainers' ranks or in a rollout task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Annotated

from slurmrl.fsio.shapes import NUMBER, FieldType

Stats = Mapping[str, tuple[float, float]]
"""Name of a metric to (sum, count)."""
SCORE = FieldType("a number or null", lambda value: value is None or NUMBER.accepts(value))


@dataclass(frozen=True, kw_only=True)
class JudgedCompletions:
    """One entry for each completion. Numbers keep all their bits, also in files."""

    scores: tuple[Annotated[float | None, SCORE], ...] = ()
    """The weighted sums; None for completions that the reward could not judge."""
    parts: tuple[Mapping[str, float], ...] = ()
    """What each part of the reward gave, before its weight, by the names of the parts that judged
    it; nothing for a reward that is not a sum."""
    stats: Stats = field(default_factory=dict)
    """What the functions have counted besides."""
    submission: int = 0
    """Of the trial, with whose code and settings a rollout task has judged. Another one may have
    another reward."""

    def problem(self, count: int) -> str | None:
        """Why these are not the scores of ``count`` completions, all finite; None if they are."""
        if (len(self.scores), len(self.parts)) != (count, count):
            return f"scores {len(self.scores)} completions of {count}"
        given = [score for part in self.parts for score in part.values()]
        counted = [number for pair in self.stats.values() for number in pair]
        scores = [score for score in self.scores if score is not None]
        if not all(map(isfinite, (*scores, *given, *counted))):
            return "holds a number that is not finite"
        return None

    def spread(self, places: Sequence[int], count: int) -> JudgedCompletions:
        """The same of ``count`` completions, of which these are at ``places``. Others score 0."""
        scores: list[float | None] = [0.0] * count
        parts = [dict[str, float]() for _ in range(count)]
        for place, score, part in zip(places, self.scores, self.parts, strict=True):
            scores[place], parts[place] = score, dict(part)
        return JudgedCompletions(scores=tuple(scores), parts=tuple(parts), stats=self.stats)

    def filled(
        self, groups: Sequence[JudgedCompletions | None], counts: Sequence[int]
    ) -> JudgedCompletions:
        """The groups in order, with these completions in the places of those that are None, which
        have so many (``counts``)."""
        found, start = [], 0
        for group, count in zip(groups, counts, strict=True):
            stop = start + (count if group is None else 0)
            here = slice(start, stop)
            found.append(
                group or JudgedCompletions(scores=self.scores[here], parts=self.parts[here])
            )
            start = stop
        return JudgedCompletions(
            scores=tuple(score for each in found for score in each.scores),
            parts=tuple(part for each in found for part in each.parts),
            stats=added([self.stats, *(each.stats for each in found)]),
        )


def added(stats: Iterable[Stats]) -> dict[str, tuple[float, float]]:
    """The sums of statistics, name by name."""
    sums: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for each in stats:
        for name, (total, count) in each.items():
            before = sums[name]
            sums[name] = before[0] + total, before[1] + count
    return dict(sums)
