"""A reward function applied to completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

import torch

from slurmrl.algorithms.base import CallContext, CallResult, Interface, Stats
from slurmrl.algorithms.reward.attempts import attempt_rates, vote_of
from slurmrl.algorithms.reward.turns import earned, last_turns, transcript
from slurmrl.algorithms.schema import TURN_REWARDS
from slurmrl.algorithms.token_notes import token_texts
from slurmrl.config.schema import Evaluation
from slurmrl.data.meta import one_each, repeated
from slurmrl.data.sample import SequenceSample
from slurmrl.errors import UsageError
from slurmrl.graph.call import Record
from slurmrl.rewards.reward import Extras, of_completion
from slurmrl.rewards.scores import check_sum
from slurmrl.rewards.weighted import WeightedReward, make_reward

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine


class RuleRewardInterface(Interface):
    """Holds the reward function and its processes until it is closed."""

    def __init__(self) -> None:
        self._reward: WeightedReward | None = None

    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """``rewards`` [S] float32, one for each completion: what the reward function gives its last
        turn, and what an episode's turns have earned. A failed episode is not judged. The sample
        carries the dataset's metadata."""
        reward = self._prepare(context)
        tokens = last_turns(sample)
        completions = decode_completions(sample, tokens, context.tokenizer)
        counts = sample.sequence_counts("input_ids")
        prompts, rows = (repeated(sample.metadata[key], counts) for key in ("prompt", "row"))
        places, extras = _places(sample, context), _extras(sample, tokens, completions, context)
        scores, parts, stats = _scores(reward, prompts, completions, rows, places, extras)
        if TURN_REWARDS in sample.keys:
            scores = _with_turns(scores, earned(sample), places)
        rewards = torch.tensor(scores, dtype=torch.float32)
        stats["reward"] = (float(sum(scores)), float(len(scores)))
        evaluation = context.settings.config.evaluation if context.evaluation else None
        records: dict[str, Record] = {}
        if evaluation is not None:
            records = score_records(sample.ids, counts, scores, completions, evaluation)
        return CallResult(
            SequenceSample(
                sample.ids,
                {"rewards": one_each(sample.lengths["input_ids"])},
                data={"rewards": rewards},
            ),
            stats,
            _texts(sample, completions, scores, parts, context),
            records=records,
        )

    def close(self) -> None:
        if self._reward is not None:
            self._reward.close()
            self._reward = None

    def _prepare(self, context: CallContext) -> WeightedReward | None:
        """The reward function; None where only episodes give rewards."""
        if self._reward is None:
            config = context.settings.config
            reward = config.reward
            if reward is None and config.rollout.episode.has_turns:
                return None
            if reward is None:
                raise UsageError("the configuration has no reward")
            self._reward = make_reward(reward, cores=context.cores)
        return self._reward


def score_records(
    names: Sequence[str],
    counts: Sequence[int],
    scores: Sequence[float],
    completions: Sequence[str],
    evaluation: Evaluation,
) -> dict[str, Record]:
    """The lines of an evaluation about its prompts, by id: all rewards, their mean, and the
    ``evaluation.rates``. ``counts`` are the numbers of completions of each prompt."""
    sizes, limit, pattern = evaluation.attempts, evaluation.pass_score, evaluation.vote_pattern
    records: dict[str, Record] = {}
    for name, end, count in zip(names, accumulate(counts), counts, strict=True):
        rewards, texts = list(scores[end - count : end]), completions[end - count : end]
        line: dict[str, Any] = {"rewards": rewards, "reward": sum(rewards) / count}
        if sizes and limit is not None:
            correct = [reward >= limit for reward in rewards]
            line |= attempt_rates(correct, [vote_of(text, pattern) for text in texts], sizes)
        records[name] = line
    return records


def _scores(
    reward: WeightedReward | None,
    prompts: Sequence[str],
    completions: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    places: Sequence[str],
    extras: Extras,
) -> tuple[list[float], list[dict[str, float]], Stats]:
    """The reward function's scores, 0 for completions without a token; those of its parts; and its
    metrics."""
    scores = [0.0] * len(completions)
    parts: list[dict[str, float]] = [{} for _ in completions]
    judged = [place for place, tokens in enumerate(extras["token_ids"]) if tokens]
    if reward is None or not judged:
        return scores, parts, {}
    given = reward.score(
        [prompts[place] for place in judged],
        [completions[place] for place in judged],
        [rows[place] for place in judged],
        [places[place] for place in judged],
        of_completion(extras, judged),
    )
    for place, score, terms in zip(judged, given, reward.parts(), strict=True):
        scores[place], parts[place] = score, terms
    return scores, parts, reward.stats()


def _with_turns(
    scores: Sequence[float], earned: Sequence[float], places: Sequence[str]
) -> list[float]:
    """The scores and what the turns have earned besides."""
    sums = [score + more for score, more in zip(scores, earned, strict=True)]
    for total, score, more, place in zip(sums, scores, earned, places, strict=True):
        check_sum(total, place, f"{score:g} + {more:g} (its turns)")
    return sums


def decode_completions(
    sample: SequenceSample, tokens: Sequence[Sequence[int]], tokenizer: Any
) -> list[str]:
    """The text of each completion, without special tokens and without the stop token that ended it
    (which need not be a special token)."""
    finished = sample.tensor("finished").tolist()
    return [
        tokenizer.decode(each[: len(each) - bool(ended)], skip_special_tokens=True)
        for each, ended in zip(tokens, finished, strict=True)
    ]


def _extras(
    sample: SequenceSample,
    tokens: list[list[int]],
    completions: Sequence[str],
    context: CallContext,
) -> Extras:
    """What a reward may ask for besides texts and rows (docs/rewards.md)."""
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


def _texts(
    sample: SequenceSample,
    completions: list[str],
    scores: list[float],
    parts: list[dict[str, float]],
    context: CallContext,
) -> list[dict[str, Any]]:
    """Rows of the samples table: the first `logging.samples` completions, those of one prompt side
    by side and numbered by their ``index``; with the parts of the reward, the texts of
    their tokens and the turns of episodes."""
    finished = sample.tensor("finished").tolist()
    counts = sample.sequence_counts("input_ids")
    places = ((item, place) for item, count in enumerate(counts) for place in range(count))
    kept = context.settings.config.logging
    told = [] if context.evaluation else token_texts(sample, kept, context.tokenizer)
    tokens = dict(enumerate(told))
    return [
        {
            "id": sample.ids[item],
            **({"index": place} if counts[item] > 1 else {}),
            "prompt": sample.metadata["prompt"][item],
            "completion": completions[number],
            "answer": sample.metadata["answer"][item],
            "reward": scores[number],
            **({"parts": parts[number]} if parts[number] else {}),
            "finished": bool(finished[number]),
            **tokens.get(number, {}),
            **(
                {"turns": transcript(sample, number, context.tokenizer)}
                if TURN_REWARDS in sample.keys
                else {}
            ),
        }
        for number, (item, place) in enumerate(islice(places, kept.samples))
    ]
