"""Filters of prompts by the scores and the ends of their completions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, cast

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.policy.advantages import find_responses, only_scored, shape_scores
from slurmrl.algorithms.policy.schema import PolicyGradient
from slurmrl.algorithms.policy.sections import TRUNCATED, ZERO_VARIANCE, Filters
from slurmrl.data.sample import SequenceSample

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine


class FilterInterface(Interface):
    def filter(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Drop prompts by the settings of the algorithm.

        Reports the share of prompts that each filter drops; of several reasons for one prompt, the
        first counts. Failed episodes, in which the policy wrote nothing, and completions without a
        score are left out of the comparison, as they are from advantages.
        """
        sample = only_scored(sample)
        settings = cast(PolicyGradient, context.settings.algorithm)
        limit = context.settings.config.rollout.most_written
        responses = find_responses(sample.tensor("prompt_mask"), sample.cu_seqlens("prompt_mask"))
        lengths = responses.cu_seqlens.diff()
        finished = sample.tensor("finished").bool()
        scores = shape_scores(sample.tensor("rewards"), finished, lengths, settings, limit)
        rows = list(zip(scores.tolist(), finished.tolist(), lengths.tolist(), strict=True))
        cuts = accumulate(sample.sequence_counts("rewards"), initial=0)
        dropped = {}
        for name, (start, stop) in zip(sample.ids, pairwise(cuts), strict=True):
            ended = [(score, end) for score, end, length in rows[start:stop] if length]
            if why := reason([score for score, _ in ended], [end for _, end in ended], settings):
                dropped[name] = why
        reasons = list(dropped.values())
        return CallResult(
            dropped=dropped,
            stats={
                f"filter/{why}": (float(reasons.count(why)), float(sample.bs))
                for why in (TRUNCATED, ZERO_VARIANCE)
            },
        )


def reason(scores: Sequence[float], finished: Sequence[bool], settings: Filters) -> str | None:
    """Return why a prompt is dropped; None if it is not.

    ``scores`` are the scores of the completions to compare. ``finished`` says whether each of them
    ended with a stop token. Without completions, the prompt has no variance.
    """
    truncated = len(finished) - sum(finished)
    if settings.max_truncated is not None and truncated > settings.max_truncated * len(finished):
        return TRUNCATED
    if settings.zero_variance == "drop":
        if settings.mask_truncated and truncated == len(finished) > 0:
            return TRUNCATED
        if len(set(scores)) < 2:
            return ZERO_VARIANCE
    return None
