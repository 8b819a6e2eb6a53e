"""Filters of prompts by the rewards and the ends of their completions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, cast

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.policy.responses import find_responses
from slurmrl.algorithms.policy.schema.filters import TRUNCATED, ZERO_VARIANCE, Filters
from slurmrl.data.sample import SequenceSample

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine


class FilterInterface(Interface):
    def filter(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Drop prompts by the settings of the algorithm. Reports the share of prompts that each
        filter drops; of several reasons for one prompt, the first counts. Failed episodes, in which
        the policy wrote nothing, are left out of the comparison."""
        settings = cast(Filters, context.settings.algorithm)
        rewards, finished = sample.tensor("rewards").tolist(), sample.tensor("finished").tolist()
        responses = find_responses(sample.tensor("prompt_mask"), sample.cu_seqlens("prompt_mask"))
        answered = set(responses.answered.tolist())
        dropped = {}
        cuts = accumulate(sample.sequence_counts("rewards"), initial=0)
        for name, (start, stop) in zip(sample.ids, pairwise(cuts), strict=True):
            trained = [place for place in range(start, stop) if place in answered]
            why = reason(
                [rewards[place] for place in trained],
                [finished[place] for place in trained],
                settings,
            )
            if why is not None:
                dropped[name] = why
        reasons = list(dropped.values())
        return CallResult(
            dropped=dropped,
            stats={
                f"filter/{why}": (float(reasons.count(why)), float(sample.bs))
                for why in (TRUNCATED, ZERO_VARIANCE)
            },
        )


def reason(rewards: Sequence[float], finished: Sequence[bool], settings: Filters) -> str | None:
    """Why a prompt is dropped, given the rewards of the completions to train on and whether each
    ended with a stop token; None if it is not. Without completions the prompt has no variance."""
    if settings.max_truncated is not None:
        truncated = len(finished) - sum(map(bool, finished))
        if truncated > settings.max_truncated * len(finished):
            return TRUNCATED
    if settings.zero_variance == "drop" and len(set(rewards)) < 2:
        return ZERO_VARIANCE
    return None
