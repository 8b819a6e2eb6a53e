"""What the reward is asked about completions: by the trainers' ranks, and by rollout tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.reward.turns import last_turns
from slurmrl.data.meta import repeated
from slurmrl.data.sample import SequenceSample
from slurmrl.rewards.judged import JudgedCompletions
from slurmrl.rewards.reward import Extras, of_completion
from slurmrl.rewards.weighted import Row


@dataclass(frozen=True, kw_only=True)
class Questions:
    """The arguments of `WeightedReward.judge`, one entry for each completion."""

    prompts: Sequence[str]
    completions: Sequence[str]
    rows: Sequence[Row]
    places: Sequence[str]
    """Source lines, for messages."""
    extras: Extras

    @staticmethod
    def about(sample: SequenceSample, context: CallContext) -> Questions:
        """The sample has completions, and carries the dataset's metadata."""
        tokens = last_turns(sample)
        completions = decode_completions(sample, tokens, context)
        counts = sample.sequence_counts("input_ids")
        prompts, rows = (repeated(sample.metadata[key], counts) for key in ("prompt", "row"))
        return Questions(
            prompts=prompts,
            completions=completions,
            rows=rows,
            places=_places(sample, context),
            extras=_extras(sample, tokens, completions, context),
        )

    def of(self, places: Sequence[int]) -> Questions:
        """Those about some of the completions."""
        return Questions(
            prompts=[self.prompts[place] for place in places],
            completions=[self.completions[place] for place in places],
            rows=[self.rows[place] for place in places],
            places=[self.places[place] for place in places],
            extras=of_completion(self.extras, places),
        )

    def answered(self, judge: Judge) -> JudgedCompletions:
        """What the judge says; it is not asked about completions without a token, which score 0:
        their episodes have failed."""
        asked = [place for place, tokens in enumerate(self.extras["token_ids"]) if tokens]
        found = judge(self.of(asked)) if asked else JudgedCompletions()
        return found.spread(asked, len(self.completions))


Judge: TypeAlias = Callable[[Questions], JudgedCompletions]


def decode_completions(
    sample: SequenceSample, tokens: Sequence[Sequence[int]], context: CallContext
) -> list[str]:
    """The text of each completion, without special tokens and without the stop token that ended it
    (which need not be a special token). A stop string that ended it is part of the text."""
    finished, stops = sample.tensor("finished").tolist(), context.stop_token_ids
    tokenizer: Any = context.tokenizer
    kept = (
        each[:-1] if ended and each and each[-1] in stops else each
        for each, ended in zip(tokens, finished, strict=True)
    )
    return [tokenizer.decode(each, skip_special_tokens=True) for each in kept]


def _extras(
    sample: SequenceSample,
    tokens: list[list[int]],
    completions: Sequence[str],
    context: CallContext,
) -> Extras:
    """What a reward may ask for in addition to texts and rows (docs/rewards.md)."""
    counts = sample.sequence_counts("input_ids")
    ends = list(accumulate(counts))
    groups = [list(completions[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    extras: dict[str, Any] = {
        "token_ids": tokens,
        "finished": [bool(ended) for ended in sample.tensor("finished").tolist()],
        "sample_ids": repeated(sample.ids, counts),
        "indices": [index for count in counts for index in range(count)],
        "siblings": repeated(groups, counts),
        "step": context.step,
        "evaluation": context.evaluation,
    }
    if "model_scores" in sample.keys:
        extras["model_scores"] = sample.tensor("model_scores").tolist()
    return extras


def _places(sample: SequenceSample, context: CallContext) -> list[str]:
    """Source line of each completion: ``data.jsonl:17 (sample 17@0)``; with ``, index 2`` if the
    sample has several."""
    path = context.dataset.title
    return [
        f"{path}:{line} (sample {name}{f', index {place}' if count > 1 else ''})"
        for line, name, count in zip(
            sample.metadata["line"], sample.ids, sample.sequence_counts("input_ids"), strict=True
        )
        for place in range(count)
    ]
