"""A greedy completion of each prompt and its reward, under keys of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from slurmrl.algorithms.base import CallContext, CallResult
from slurmrl.algorithms.policy.schema import GREEDY
from slurmrl.algorithms.reward_model import ScoresInterface
from slurmrl.algorithms.rollout.interface import RolloutInterface
from slurmrl.algorithms.rule_reward import RuleRewardInterface
from slurmrl.algorithms.schema import TURN_REWARDS
from slurmrl.data.sample import SequenceSample

if TYPE_CHECKING:
    from slurmrl.engines.base import GenerateEngine, TrainEngine

COMPLETION: Final = ("input_ids", "prompt_mask", "finished", TURN_REWARDS)


class GreedyRolloutInterface(RolloutInterface):
    def generate(
        self, engine: GenerateEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """One completion of each prompt from its most probable tokens."""
        result = super().generate(engine, sample, _greedy(context))
        if result.sample is None:  # another rank of this copy has the completions
            return result
        names = {key: GREEDY + key for key in COMPLETION if key in result.sample.keys}
        lengths = result.stats["response_length"]
        return CallResult(_renamed(result.sample, names), {"greedy_response_length": lengths})


class GreedyRewardInterface(RuleRewardInterface):
    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """``greedy_rewards``, one for each prompt."""
        keys = (*COMPLETION, "model_scores")
        plain = _renamed(sample, {GREEDY + k: k for k in keys if GREEDY + k in sample.keys})
        result = super().inference(engine, plain, context)
        assert result.sample is not None
        return CallResult(
            _renamed(result.sample, {"rewards": "greedy_rewards"}),
            {"greedy_reward": result.stats["reward"]},
        )


class GreedyScoresInterface(ScoresInterface):
    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """``greedy_model_scores``, one for each prompt."""
        names = {GREEDY + key: key for key in ("input_ids", "prompt_mask")}
        plain = _renamed(sample, {old: new for old, new in names.items() if old in sample.keys})
        result = super().inference(engine, plain, context)
        assert result.sample is not None
        return CallResult(_renamed(result.sample, {"model_scores": "greedy_model_scores"}))


def _greedy(context: CallContext) -> CallContext:
    """The context of a generation that takes the most probable tokens."""
    config = context.settings.config
    rollout = config.rollout.model_copy(update={"greedy": True, "n": 1})
    config = config.model_copy(update={"rollout": rollout})
    return replace(context, settings=replace(context.settings, config=config))


def _renamed(sample: SequenceSample, names: Mapping[str, str]) -> SequenceSample:
    """The keys in ``names`` under their new names; tensors are shared."""
    return SequenceSample(
        sample.ids,
        {new: sample.lengths[old] for old, new in names.items()},
        sample.metadata,
        {new: sample.data[old] for old, new in names.items()},
    )
