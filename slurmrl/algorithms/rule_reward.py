"""Rewards by rules: call the reward function and turn its scores into rewards and records.

The trainers' ranks and rollout tasks make the same calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from math import nan
from typing import TYPE_CHECKING, Any

import torch

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.schema import TURN_REWARDS
from slurmrl.algorithms.sequences import kept, token_texts
from slurmrl.algorithms.summaries import attempt_rates, vote_of
from slurmrl.config.schema import Evaluation
from slurmrl.data.meta import one_each, repeated
from slurmrl.data.sample import SequenceSample
from slurmrl.errors import RewardError, UsageError
from slurmrl.plan.dataflow import Record
from slurmrl.plan.metric_names import SCORED_BY_TASKS, UNSCORED, misnamed
from slurmrl.rewards.base import Stats, added, check_sum, metrics
from slurmrl.rewards.checked_reward import Extras, of_completion
from slurmrl.rewards.weighted import WeightedReward, make_reward

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine


Scores = tuple[Sequence[float | None], Sequence[Mapping[str, float]], Stats]
"""Scores of completions, scores of the reward's parts, and metrics of its functions."""


class RuleRewardInterface(Interface):
    """Interface that keeps the reward function and its processes until `close`."""

    def __init__(self) -> None:
        self._reward: WeightedReward | None = None

    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Return ``rewards`` [S] float32, one for each completion.

        A reward is the reward function's score of the last turn plus the rewards that an episode's
        turns have earned. The reward is NaN if the function could not score the completion. The
        function scores neither failed episodes nor completions that a rollout task has scored. The
        sample has the dataset's metadata.
        """
        groups = [_by_task(name, context) for name in sample.ids]
        reward = self._prepare(context) if None in groups else None
        arguments = reward_arguments(sample, context)
        completions, places = arguments["completions"], arguments["places"]
        counts = sample.sequence_counts("input_ids")
        scores, parts, counted = _scored(groups, counts, arguments, reward)
        config = context.settings.config
        if why := misnamed(counted, config, context.settings.algorithm):
            raise RewardError(f"reward {config.reward and config.reward.title}: {why}")
        stats = metrics(counted, parts)
        if TURN_REWARDS in sample.keys:
            scores = _with_turns(scores, earned(sample), places)
        rewards = torch.tensor([nan if one is None else one for one in scores], dtype=torch.float32)
        scored = [score for score in scores if score is not None]
        stats["reward"] = (float(sum(scored)), float(len(scored)))
        if len(scored) < len(scores) or (config.reward is not None and config.reward.may_not_score):
            stats[UNSCORED] = (float(len(scores) - len(scored)), float(len(scores)))
        if context.stored:
            by_tasks = sum(count for count, group in zip(counts, groups, strict=True) if group)
            stats[SCORED_BY_TASKS] = (float(by_tasks), float(len(scores)))
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
            _texts(sample, completions, scores, parts, context),
            records=records,
        )

    def close(self) -> None:
        if self._reward is not None:
            self._reward.close()
            self._reward = None

    def _prepare(self, context: CallContext) -> WeightedReward | None:
        """Return the reward function; None if only episodes give rewards."""
        if self._reward is None:
            config = context.settings.config
            reward = config.reward
            if reward is None and config.rollout.episode.has_turns:
                return None
            if reward is None:
                raise UsageError("the configuration has no reward")
            self._reward = make_reward(reward, cores=context.cores)
        return self._reward


def _by_task(name: str, context: CallContext) -> Scores | None:
    """Return the scores that a rollout task gave an item's completions; None without scores."""
    group = None if context.stored is None else context.stored(name)
    if group is None or group.scores is None:
        return None
    return group.scores, group.parts, group.stats


def _scored(
    groups: Sequence[Scores | None],
    counts: Sequence[int],
    arguments: Mapping[str, Any],
    reward: WeightedReward | None,
) -> Scores:
    """Return the scores of rollout tasks, with scores of the reward function for other items."""
    scores: list[float | None] = []
    parts: list[Mapping[str, float]] = []
    left: list[int] = []
    for group, count in zip(groups, counts, strict=True):
        if group is None:
            left += range(len(scores), len(scores) + count)
            scores += [0.0] * count
            parts += [{}] * count
        else:
            scores += group[0]
            parts += group[1]
    stats = [group[2] for group in groups if group]
    asked = with_tokens(arguments, left)
    if reward is not None and asked:
        given = reward.score(**of_places(arguments, asked))
        for place, score, part in zip(asked, given, reward.given, strict=True):
            scores[place], parts[place] = score, part
        stats.insert(0, reward.stats())
    return scores, parts, added(stats)


def score_records(
    names: Sequence[str],
    counts: Sequence[int],
    scores: Sequence[float | None],
    completions: Sequence[str],
    evaluation: Evaluation,
) -> dict[str, Record]:
    """Return a mapping from the id of each prompt to its line in an evaluation.

    A line has all rewards, their mean, and the ``evaluation.rates``. ``counts`` are the numbers of
    completions of each prompt. Completions without a score are not in the mean, and their prompts
    have no rates.
    """
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
    """Return the scores plus the rewards of the turns; None remains None."""
    sums: list[float | None] = []
    for score, more, place in zip(scores, earned, places, strict=True):
        sums.append(None if score is None else score + more)
        if score is not None:
            check_sum(score + more, place, f"{score:g} + {more:g} (rewards of turns)")
    return sums


def _texts(
    sample: SequenceSample,
    completions: Sequence[str],
    scores: Sequence[float | None],
    parts: Sequence[Mapping[str, float]],
    context: CallContext,
) -> list[dict[str, Any]]:
    """Return rows of the samples table: at least `logging.samples` completions.

    The completions of a prompt are adjacent and numbered by ``index``. Rows have the parts of the
    reward, the strings of their tokens and the turns of episodes.
    """
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
    """Return ``rendered``, the prompt that the policy reads, if the dataset's prompt differs.

    The rendered prompt includes the system prompt and the template.
    """
    start, stop = sample.cu_seqlens("input_ids")[number : number + 2].tolist()
    written = (~sample.tensor("prompt_mask")[start:stop]).nonzero()
    end = start + int(written[0]) if len(written) else stop
    text = str(tokenizer.decode(sample.tensor("input_ids")[start:end].tolist()))
    return {} if text == sample.metadata["prompt"][item] else {"rendered": text}


def reward_arguments(sample: SequenceSample, context: CallContext) -> dict[str, Any]:
    """Return the arguments of `WeightedReward.score` for all completions of a sample.

    The sample has the dataset's metadata.
    """
    tokens = last_turns(sample)
    completions = decode_completions(sample, tokens, context)
    counts = sample.sequence_counts("input_ids")
    return {
        "prompts": repeated(sample.metadata["prompt"], counts),
        "completions": completions,
        "rows": repeated(sample.metadata["row"], counts),
        "places": _places(sample, context),
        "extras": _extras(sample, tokens, completions, context),
    }


def of_places(arguments: Mapping[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """Return ``arguments`` (of `reward_arguments`) for only the completions at ``places``."""
    extras = of_completion(arguments["extras"], places)
    names = ("prompts", "completions", "rows", "places")
    return {name: [arguments[name][at] for at in places] for name in names} | {"extras": extras}


def with_tokens(arguments: Mapping[str, Any], places: Iterable[int]) -> list[int]:
    """Return the places of completions with a token. Failed episodes have no tokens and score 0."""
    return [place for place in places if arguments["extras"]["token_ids"][place]]


def decode_completions(
    sample: SequenceSample, tokens: Sequence[Sequence[int]], context: CallContext
) -> list[str]:
    """Decode each completion to a string without special tokens.

    The string excludes the stop token that ended the completion, even if this is no special token.
    The result includes a stop string that ended the completion.
    """
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
    """Return the additional arguments that a reward may request (`checked_reward.Extras`)."""
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
    """Return the source line of each completion: ``data.jsonl:17 (sample 17@0)``.

    If a prompt has several completions, the line is ``data.jsonl:17 (sample 17@0, index 2)``.
    """
    path = context.dataset.title
    return [
        f"{path}:{line} (sample {name}{f', index {place}' if count > 1 else ''})"
        for line, name, count in zip(
            sample.metadata["line"], sample.ids, sample.sequence_counts("input_ids"), strict=True
        )
        for place in range(count)
    ]


def last_turns(sample: SequenceSample) -> list[list[int]]:
    """Return the tokens of each completion's last turn, with the stop token that ended the turn.

    A failed episode has no tokens.
    """
    ids, read = sample.tensor("input_ids").tolist(), sample.tensor("prompt_mask").tolist()
    cuts = sample.cu_seqlens("input_ids").tolist()
    turns = []
    for start, stop in pairwise(cuts):
        first = stop
        while first > start and not read[first - 1]:
            first -= 1
        turns.append(ids[first:stop])
    return turns


def earned(sample: SequenceSample) -> list[float]:
    """Return, for each completion, the sum of the rewards of its turns."""
    rewards = sample.tensor(TURN_REWARDS).double().cpu()
    parts = rewards.tensor_split(sample.cu_seqlens(TURN_REWARDS)[1:-1].long())
    return [float(part.sum()) for part in parts] if sample.bs else []


def transcript(sample: SequenceSample, number: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the turns of a completion and the messages between them, with special tokens."""
    start, stop = sample.cu_seqlens("input_ids")[number : number + 2].tolist()
    ids = sample.tensor("input_ids")[start:stop].tolist()
    read = sample.tensor("prompt_mask")[start:stop].tolist()
    rewards = sample.tensor(TURN_REWARDS)[start:stop].tolist()
    rows = []
    for is_read, places in groupby(range(len(ids)), read.__getitem__):
        at = list(places)
        if is_read and not at[0]:
            continue  # the rows do not repeat the prompt
        text = tokenizer.decode([ids[place] for place in at])
        if is_read:
            rows.append({"read": text})
        else:
            rows.append({"wrote": text, "reward": sum(rewards[place] for place in at)})
    return rows
