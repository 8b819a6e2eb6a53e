"""The actor's training, and log-probabilities of completions by a training engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.policy.advantages import (
    Estimates,
    estimate,
    old_logprobs,
    spread_over_tokens,
)
from slurmrl.algorithms.policy.loss import policy_loss
from slurmrl.algorithms.policy.moments import SumOverRanks, moments, whiten
from slurmrl.algorithms.policy.schema import OLD_LOGPROBS, REF_LOGPROBS, PolicyGradient
from slurmrl.algorithms.policy.updates import MeanStats, global_result, run_updates
from slurmrl.data.sample import SequenceSample

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine


class ActorInterface(Interface):
    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """The model's log-probabilities of the completions, as ``ref_logprobs``."""
        return CallResult(_logprobs(engine, sample, context, REF_LOGPROBS))

    def train_step(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Clipped policy updates on advantages that are normalised over the whole batch."""
        assert engine is not None
        ppo = cast(PolicyGradient, context.settings.algorithm)
        sample = sample.to(engine.context.device)
        estimates = estimate(sample, context, engine.all_reduce_sum)
        mean, std = moments(estimates.advantages, engine.all_reduce_sum)
        stats = {"advantages_mean": mean, "advantages_std": std}
        if estimates.kl is not None:
            stats |= _kl_stats(estimates.kl, len(sample.tensor("rewards")), engine.all_reduce_sum)
            stats["kl_coef"] = context.scalars["kl_coef"]
        advantages = estimates.advantages
        if ppo.normalize_advantages:
            advantages = whiten(advantages, mean, std)
        means = run_updates(
            engine,
            _training_sample(sample, estimates, advantages),
            context.batch,
            "response_mask",
            partial(actor_loss, ppo=ppo),
            ppo,
            temperature=context.settings.config.rollout.temperature,
            stop=_stop(ppo.early_stop_importance_ratio),
        )
        return global_result({**stats, **means}, "actor")


class RecomputeInterface(Interface):
    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """The training engine's log-probabilities of the completions, as ``old_logprobs``. Reports
        the mean and largest absolute difference to those of generation, over response tokens."""
        assert engine is not None
        sample = sample.to(engine.context.device)
        output = _logprobs(engine, sample, context, OLD_LOGPROBS)
        response = ~sample.tensor("prompt_mask")
        distance = (output.tensor(OLD_LOGPROBS) - sample.tensor("logprobs")).abs().double()
        distance = torch.where(response, distance, 0.0)
        largest = distance.max() if len(distance) else distance.sum()
        largest = engine.all_reduce_max(largest)
        values = torch.stack([distance.sum(), response.sum().double(), largest])
        total, tokens, most = values.tolist()
        stats = {
            "logprob_difference_mean": (total, tokens),
            "logprob_difference_max": (most, 1.0),  # the same on all ranks, whose mean is reported
        }
        return CallResult(output, stats)


def _logprobs(
    engine: TrainEngine | None, sample: SequenceSample, context: CallContext, key: str
) -> SequenceSample:
    """The engine's log-probabilities of all tokens under ``key``."""
    assert engine is not None
    temperature = context.settings.config.rollout.temperature
    outputs = engine.forward(sample.only(["input_ids"]), temperature=temperature)
    data: dict[str, Tensor | None] = {key: outputs["logp"]}
    return SequenceSample(sample.ids, {key: sample.lengths["input_ids"]}, data=data)


def actor_loss(
    outputs: dict[str, Tensor], batch: SequenceSample, ppo: PolicyGradient
) -> tuple[Tensor, dict[str, Tensor]]:
    """The engine's loss function: outputs {logp, entropy} [T]."""
    return policy_loss(
        outputs["logp"],
        outputs["entropy"],
        batch.tensor("logprobs"),
        batch.tensor("advantages"),
        batch.tensor("response_mask"),
        clip_ratio=ppo.clip_ratio,
        entropy_coef=ppo.entropy_coef,
    )


def _training_sample(
    sample: SequenceSample, estimates: Estimates, advantages: Tensor
) -> SequenceSample:
    ids = sample.tensor("input_ids")
    rows = sample.lengths["input_ids"]
    data: dict[str, Tensor | None] = {
        "input_ids": ids,
        "logprobs": old_logprobs(sample),
        "response_mask": ~sample.tensor("prompt_mask"),
        "advantages": spread_over_tokens(advantages, estimates.responses.tokens, len(ids)),
    }
    return SequenceSample(sample.ids, dict.fromkeys(data, rows), data=data)


def _kl_stats(kl: Tensor, sequences: int, all_reduce_sum: SumOverRanks) -> MeanStats:
    """KL of the sampling policy to the reference, per token and per completion, and the number of
    completions."""
    kl = kl.double()
    sizes = kl.new_tensor([float(len(kl)), float(sequences)])
    total, tokens, completions = all_reduce_sum(torch.cat([kl.sum().reshape(1), sizes])).tolist()
    return {
        "kl": total / max(tokens, 1.0),
        "kl_sequence": total / max(completions, 1.0),
        "completions": completions,
    }


def _stop(limit: float | None) -> Callable[[MeanStats], bool] | None:
    """The test of a minibatch's mean probability ratio that ends the updates of a step."""
    return None if limit is None else lambda means: means["importance_ratio"] > limit
