"""A reward function applied to completions."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.data.sample import SequenceSample
from slurmrl.errors import UsageError
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
        """``rewards`` [S] float32. The sample carries the dataset's metadata."""
        reward = self._prepare(context)
        completions = decode_completions(sample, context.tokenizer)
        prompts, rows = sample.metadata["prompt"], sample.metadata["row"]
        scores = reward.score(prompts, completions, rows, _places(sample, context))
        data: dict[str, Tensor | None] = {"rewards": torch.tensor(scores, dtype=torch.float32)}
        stats = reward.stats() if completions else {}
        stats["reward"] = (float(sum(scores)), float(len(scores)))
        return CallResult(
            SequenceSample.from_default([1] * sample.bs, sample.ids, data),
            stats,
            _texts(sample, completions, scores, context.settings.config.logging.samples),
        )

    def close(self) -> None:
        if self._reward is not None:
            self._reward.close()
            self._reward = None

    def _prepare(self, context: CallContext) -> WeightedReward:
        if self._reward is None:
            reward = context.settings.config.reward
            if reward is None:
                raise UsageError("the configuration has no reward")
            self._reward = make_reward(reward, cores=context.cores)
        return self._reward


def decode_completions(sample: SequenceSample, tokenizer: Any) -> list[str]:
    """The text after each prompt, without special tokens and without the stop token that ended it
    (which need not be a special token)."""
    ids, prompt = sample.tensor("input_ids").tolist(), sample.tensor("prompt_mask").tolist()
    cuts = [0, *accumulate(sample.item_lengths("input_ids"))]
    finished = sample.tensor("finished").tolist()
    return [
        tokenizer.decode(
            [ids[at] for at in range(start, stop - bool(ended)) if not prompt[at]],
            skip_special_tokens=True,
        )
        for (start, stop), ended in zip(pairwise(cuts), finished, strict=True)
    ]


def _places(sample: SequenceSample, context: CallContext) -> list[str]:
    """Source line of each item: ``data.jsonl:17 (sample 17@0)``."""
    config = context.settings.config
    evaluation = config.evaluation if context.evaluation else None
    path = (evaluation or config).dataset.path
    return [
        f"{path}:{line} (sample {name})"
        for line, name in zip(sample.metadata["line"], sample.ids, strict=True)
    ]


def _texts(
    sample: SequenceSample, completions: list[str], scores: list[float], limit: int
) -> list[dict[str, Any]]:
    finished = sample.tensor("finished").tolist()
    return [
        {
            "id": sample.ids[index],
            "prompt": sample.metadata["prompt"][index],
            "completion": completions[index],
            "answer": sample.metadata["answer"][index],
            "reward": scores[index],
            "finished": bool(finished[index]),
        }
        for index in range(min(limit, sample.bs))
    ]
