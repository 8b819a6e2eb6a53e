"""A reward function applied to completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import nan
from typing import TYPE_CHECKING, Any

import torch

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.reward.attempts import attempt_rates, vote_of
from slurmrl.algorithms.reward.questions import Questions
from slurmrl.algorithms.reward.turns import earned, transcript
from slurmrl.algorithms.schema import TURN_REWARDS
from slurmrl.algorithms.token_notes import kept, token_texts
from slurmrl.config.schema import Evaluation
from slurmrl.data.meta import one_each
from slurmrl.data.sample import SequenceSample
from slurmrl.errors import UsageError
from slurmrl.plan.graph.call import Record
from slurmrl.plan.metrics import JUDGED, UNSCORED
from slurmrl.rewards.judged import JudgedCompletions, added
from slurmrl.rewards.scores import check_sum
from slurmrl.rewards.weighted import WeightedReward, make_reward, part_stats

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
        turn, and what an episode's turns have earned; NaN where it could not judge the completion.
        A failed episode is not judged, nor is what a rollout task has judged. The sample carries
        the dataset's metadata."""
        groups = [context.stored(name).judged if context.stored else None for name in sample.ids]
        reward = self._prepare(context) if any(group is None for group in groups) else None
        questions = Questions.about(sample, context)
        completions, places = questions.completions, questions.places
        counts = sample.sequence_counts("input_ids")
        judged = _judged(groups, counts, questions, reward)
        scores: Sequence[float | None] = judged.scores
        stats = added([judged.stats, part_stats(judged.parts)])
        if TURN_REWARDS in sample.keys:
            scores = _with_turns(scores, earned(sample), places)
        rewards = torch.tensor([nan if one is None else one for one in scores], dtype=torch.float32)
        scored = [score for score in scores if score is not None]
        stats["reward"] = (float(sum(scored)), float(len(scored)))
        config = context.settings.config
        if len(scored) < len(scores) or (config.reward is not None and config.reward.may_not_score):
            stats[UNSCORED] = (float(len(scores) - len(scored)), float(len(scores)))
        if context.stored:
            by_tasks = sum(count for count, group in zip(counts, groups, strict=True) if group)
            stats[JUDGED] = (float(by_tasks), float(len(scores)))
        evaluation = config.evaluation if context.evaluation else None
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
            _texts(sample, completions, scores, judged.parts, context),
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


def _judged(
    groups: Sequence[JudgedCompletions | None],
    counts: Sequence[int],
    questions: Questions,
    reward: WeightedReward | None,
) -> JudgedCompletions:
    """What rollout tasks have said, and the reward function about all other items."""
    left = [
        place
        for group, count, end in zip(groups, counts, accumulate(counts), strict=True)
        if group is None
        for place in range(end - count, end)
    ]
    if reward is None:
        return JudgedCompletions().spread([], len(left)).filled(groups, counts)
    judge = reward.judge
    return questions.of(left).answered(lambda asked: judge(**vars(asked))).filled(groups, counts)


def score_records(
    names: Sequence[str],
    counts: Sequence[int],
    scores: Sequence[float | None],
    completions: Sequence[str],
    evaluation: Evaluation,
) -> dict[str, Record]:
    """The lines of an evaluation about its prompts, by id: all rewards, their mean, and the
    ``evaluation.rates``. ``counts`` are the numbers of completions of each prompt. Completions
    without a score are not in the mean, and their prompts have no rates."""
    sizes, limit, pattern = evaluation.attempts, evaluation.pass_score, evaluation.vote_pattern
    records: dict[str, Record] = {}
    for name, end, count in zip(names, accumulate(counts), counts, strict=True):
        rewards, texts = list(scores[end - count : end]), completions[end - count : end]
        scored = [reward for reward in rewards if reward is not None]
        line: dict[str, Any] = {"rewards": rewards}
        if scored:
            line["reward"] = sum(scored) / len(scored)
        if sizes and limit is not None and len(scored) == count:
            correct = [reward >= limit for reward in scored]
            line |= attempt_rates(correct, [vote_of(text, pattern) for text in texts], sizes)
        records[name] = line
    return records


def _with_turns(
    scores: Sequence[float | None], earned: Sequence[float], places: Sequence[str]
) -> list[float | None]:
    """The scores and what the turns have earned besides; None stays."""
    sums: list[float | None] = []
    for score, more, place in zip(scores, earned, places, strict=True):
        sums.append(None if score is None else score + more)
        if score is not None:
            check_sum(score + more, place, f"{score:g} + {more:g} (its turns)")
    return sums


def _texts(
    sample: SequenceSample,
    completions: Sequence[str],
    scores: Sequence[float | None],
    parts: Sequence[Mapping[str, float]],
    context: CallContext,
) -> list[dict[str, Any]]:
    """Return rows of the samples table: at least `logging.samples` completions, all of a prompt
    side by side and numbered by their ``index``; with the parts of the reward, the texts of
    their tokens and the turns of episodes."""
    finished = sample.tensor("finished").tolist()
    counts = sample.sequence_counts("input_ids")
    logging = context.settings.config.logging
    told = [] if context.evaluation else token_texts(sample, logging, context.tokenizer)
    tokens = dict(enumerate(told))
    return [
        {
            "id": sample.ids[item],
            **({"index": place} if counts[item] > 1 else {}),
            "prompt": sample.metadata["prompt"][item],
            **_rendered(sample, item, number, context.tokenizer),
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
        for item, place, number in kept(counts, logging)
    ]


def _rendered(sample: SequenceSample, item: int, number: int, tokenizer: Any) -> dict[str, str]:
    """Return the prompt as the policy reads it, system prompt and template included, as field
    ``rendered``; nothing where the tokens have no other text than the prompt."""
    start, stop = sample.cu_seqlens("input_ids")[number : number + 2].tolist()
    written = (~sample.tensor("prompt_mask")[start:stop]).nonzero()
    end = start + int(written[0]) if len(written) else stop
    text = str(tokenizer.decode(sample.tensor("input_ids")[start:end].tolist()))
    return {} if text == sample.metadata["prompt"][item] else {"rendered": text}
