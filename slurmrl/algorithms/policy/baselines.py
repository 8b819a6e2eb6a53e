"""Baselines that need separate calls: the critic's values, and a greedy completion's reward.

The keys of the greedy completion of each prompt and of its reward have the prefix `GREEDY`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.policy.advantages import (
    Estimates,
    SumOverRanks,
    estimate,
    moments,
    only_scored,
    spread_over_tokens,
    trained_completions,
)
from slurmrl.algorithms.policy.objective import value_loss
from slurmrl.algorithms.policy.schema import GREEDY, PolicyGradient
from slurmrl.algorithms.policy.updates import global_result, run_updates
from slurmrl.algorithms.reward_model import ScoresInterface
from slurmrl.algorithms.rollout_calls import RolloutInterface
from slurmrl.algorithms.rule_reward import RuleRewardInterface
from slurmrl.algorithms.scalars import ReturnMoments
from slurmrl.algorithms.schema import TURN_REWARDS
from slurmrl.data.sample import SequenceSample

if TYPE_CHECKING:
    from slurmrl.engines.base import GenerateEngine, TrainEngine


COMPLETION: Final = ("input_ids", "prompt_mask", "finished", TURN_REWARDS)
"""Keys of a completion that the reward call reads."""


class CriticInterface(Interface):
    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Return ``values`` [T] of the states after each token, in units of the returns."""
        assert engine is not None
        values = engine.forward(sample.only(["input_ids"]))["values"]
        settings = cast(PolicyGradient, context.settings.algorithm)
        if settings.value_norm != "none":
            values = ReturnMoments.of(context.scalars).denormalized(values)
        data: dict[str, Tensor | None] = {"values": values}
        lengths = {"values": sample.lengths["input_ids"]}
        return CallResult(SequenceSample(sample.ids, lengths, data=data))

    def train_step(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Train the values of the states before response tokens to predict the returns.

        With ``value_norm``, normalize values and returns by moments that include these returns.
        """
        assert engine is not None
        ppo = cast(PolicyGradient, context.settings.algorithm)
        sample = only_scored(sample).to(engine.context.device)
        estimates = estimate(sample, context, engine.all_reduce_sum)
        mean, std = moments(estimates.returns, engine.all_reduce_sum)
        _, error = moments(estimates.returns - estimates.old_values, engine.all_reduce_sum)
        stats = {
            "returns_mean": mean,
            "returns_std": std,
            "explained_variance": explained_variance(std, error),
        }
        training = _training_sample(sample, estimates, ppo)
        if ppo.value_norm != "none":
            before = ReturnMoments.of(context.scalars)
            after = _joined(before, mean, std, estimates.returns, ppo, engine.all_reduce_sum)
            stats |= after.scalars()
            # Use the model's unscaled old values: clipping compares them with its new outputs.
            training.data["values"] = before.normalized(training.tensor("values"))
            training.data["returns"] = after.normalized(training.tensor("returns"))
        means = run_updates(
            engine, training, context, "state_mask", partial(critic_loss, ppo=ppo), ppo
        )
        return global_result({**stats, **means}, "critic")


def critic_loss(
    outputs: dict[str, Tensor], batch: SequenceSample, ppo: PolicyGradient
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and statistics, both sums over tokens. ``outputs``: {values} [T]."""
    return value_loss(
        outputs["values"],
        batch.tensor("values"),
        batch.tensor("returns"),
        batch.tensor("state_mask"),
        value_clip=ppo.value_clip,
        huber_delta=ppo.value_huber_delta,
    )


def _joined(
    moments: ReturnMoments,
    mean: float,
    std: float,
    returns: Tensor,
    settings: PolicyGradient,
    all_reduce_sum: SumOverRanks,
) -> ReturnMoments:
    """Return the moments after a step whose returns have this mean and standard deviation.

    ``mean`` and ``std`` are over all ranks; ``returns`` are this rank's returns.
    """
    square = std**2 + mean**2
    count = float(all_reduce_sum(returns.new_tensor(float(len(returns)), dtype=torch.float64)))
    if not count:
        return moments
    if settings.value_norm == "moving":
        return moments.moving(mean, square, count)
    return moments.exponential(mean, square, settings.value_norm_decay)


def explained_variance(returns_std: float, error_std: float) -> float:
    """Return 1 - Var(returns - values) / Var(returns): 1 is perfect, 0 is as good as a constant.

    Return 0 if the returns do not vary.
    """
    return 1.0 - (error_std / returns_std) ** 2 if returns_std > 0 else 0.0


def _training_sample(
    sample: SequenceSample, estimates: Estimates, settings: PolicyGradient
) -> SequenceSample:
    """Return the sample with each token's return at the position of the preceding state."""
    ids = sample.tensor("input_ids")
    counts = trained_completions(sample, settings)[estimates.responses.sequence]
    states = estimates.responses.tokens - 1
    returns = spread_over_tokens(estimates.returns, states, len(ids))
    data: dict[str, Tensor | None] = {
        "input_ids": ids,
        "values": sample.tensor("values"),
        "returns": returns,
        "state_mask": spread_over_tokens(counts, states, len(ids)),
    }
    return SequenceSample(sample.ids, dict.fromkeys(data, sample.lengths["input_ids"]), data=data)


class GreedyRolloutInterface(RolloutInterface):
    def generate(
        self, engine: GenerateEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Generate one completion of each prompt from the most probable tokens."""
        result = super().generate(engine, sample, _greedy(context))
        if result.sample is None:  # Another rank of this model copy has the completions.
            return result
        names = {key: GREEDY + key for key in COMPLETION if key in result.sample.keys}
        lengths = result.stats["response_length"]
        return CallResult(_renamed(result.sample, names), {"greedy_response_length": lengths})


class GreedyRewardInterface(RuleRewardInterface):
    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Return ``greedy_rewards``, one for each prompt."""
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
        """Return ``greedy_model_scores``, one for each prompt."""
        names = {GREEDY + key: key for key in ("input_ids", "prompt_mask")}
        plain = _renamed(sample, {old: new for old, new in names.items() if old in sample.keys})
        result = super().inference(engine, plain, context)
        assert result.sample is not None
        return CallResult(_renamed(result.sample, {"model_scores": "greedy_model_scores"}))


def _greedy(context: CallContext) -> CallContext:
    """Return the context of a generation that takes the most probable tokens."""
    config = context.settings.config
    rollout = config.rollout.model_copy(update={"greedy": True, "n": 1})
    config = config.model_copy(update={"rollout": rollout})
    return replace(context, settings=replace(context.settings, config=config))


def _renamed(sample: SequenceSample, names: Mapping[str, str]) -> SequenceSample:
    """Return a sample with the keys in ``names``, renamed; tensors are shared."""
    return SequenceSample(
        sample.ids,
        {new: sample.lengths[old] for old, new in names.items()},
        sample.metadata,
        {new: sample.data[old] for old, new in names.items()},
    )
