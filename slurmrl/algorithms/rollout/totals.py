"""The statistics of completions, wherever they were made. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slurmrl.algorithms.base import Stats
from slurmrl.rollouts.completions import Completions
from slurmrl.rollouts.episode_runner import EpisodeOutcome
from slurmrl.rollouts.sample_files import SampleGroup


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over completions."""

    completions: int
    prompt: int
    """Tokens of the prompts, once for each completion."""
    written: int
    """Tokens of the policy."""
    read: int
    """Tokens that it read between its turns."""
    finished: int
    turns: int
    failed: int = 0
    """Episodes."""
    tool_calls: int = 0
    tool_failures: int = 0

    @staticmethod
    def of_completions(ended: Sequence[Completions]) -> Totals:
        """The sums of completions that did not fail, and that called no tools."""
        written = sum(sum(each.written) for each in ended)
        return Totals(
            completions=len(ended),
            prompt=sum(len(each.prompt) for each in ended),
            written=written,
            read=sum(len(each.tokens) for each in ended) - written,
            finished=sum(each.finished for each in ended),
            turns=sum(each.turns for each in ended),
        )

    @staticmethod
    def of_outcomes(outcomes: Sequence[EpisodeOutcome]) -> Totals:
        return replace(
            Totals.of_completions([outcome.completions for outcome in outcomes]),
            failed=sum(bool(outcome.failure) for outcome in outcomes),
            tool_calls=sum(outcome.tool_calls for outcome in outcomes),
            tool_failures=sum(outcome.tool_failures for outcome in outcomes),
        )

    @staticmethod
    def of_groups(groups: Sequence[SampleGroup]) -> Totals:
        prompt = _sum(each.prompt_lengths.sum() for each in groups)
        written = _sum((each.drawn_by >= 0).sum() for each in groups)
        return Totals(
            completions=_sum(each.lengths.size for each in groups),
            prompt=prompt,
            written=written,
            read=_sum(each.lengths.sum() for each in groups) - prompt - written,
            finished=_sum(each.finished.sum() for each in groups),
            turns=_sum(each.turns.sum() for each in groups),
            failed=_sum(each.failed.sum() for each in groups),
            tool_calls=_sum(each.tool_calls.sum() for each in groups),
            tool_failures=_sum(each.tool_failures.sum() for each in groups),
        )

    def stats(self, *, turns: bool, tools: bool) -> Stats:
        """Return the metrics; ``turns`` and ``tools`` add metrics of episodes and of tool calls.

        ``turns``: the completions are of episodes that may have several turns. ``tools``: these
        episodes may call tools.
        """
        sums = {
            "response_length": self.written,
            "prompt_length": self.prompt,
            "finished": self.finished,
        }
        if turns:
            sums |= {
                "turns": self.turns,
                "context_length": self.read,
                "episode_failed": self.failed,
            }
        if tools:
            sums["tool_calls"] = self.tool_calls
        count = float(self.completions)
        stats = {name: (float(value), count) for name, value in sums.items()}
        if tools:
            stats["tool_failed"] = (float(self.tool_failures), float(self.tool_calls))
        return stats


def _sum(values: Iterable[Any]) -> int:
    return sum(map(int, values))
