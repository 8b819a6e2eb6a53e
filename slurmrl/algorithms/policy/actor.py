"""The actor's training, and log-probabilities of completions by a training engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.policy.actor_update import read_by_models, update_actor
from slurmrl.algorithms.policy.advantages import (
    estimate,
    old_logprobs,
    spread_over_tokens,
    trained_completions,
)
from slurmrl.algorithms.policy.correction import RATIO_MAX, mismatch_metrics, mismatch_sums
from slurmrl.algorithms.policy.moments import SumOverRanks, moments, whiten
from slurmrl.algorithms.policy.schema import OLD_LOGPROBS, REF_LOGPROBS, PolicyGradient
from slurmrl.algorithms.policy.scored import only_scored
from slurmrl.algorithms.policy.updates import MeanStats, global_result
from slurmrl.algorithms.token_notes import token_notes
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
        """Updates on advantages that are normalised over the whole batch."""
        assert engine is not None
        ppo = cast(PolicyGradient, context.settings.algorithm)
        sample = only_scored(sample).to(engine.context.device)
        estimates = estimate(sample, context, engine.all_reduce_sum)
        mean, std = moments(estimates.advantages, engine.all_reduce_sum)
        stats = {"advantages_mean": mean, "advantages_std": std}
        completions = len(sample.tensor("rewards"))
        if estimates.kl is not None:
            stats |= _kl_stats(estimates.kl, completions, engine.all_reduce_sum)
            stats["kl_coef"] = context.scalars["kl_coef"]
        else:
            own = torch.tensor(
                float(completions), dtype=torch.float64, device=engine.context.device
            )
            stats["completions"] = float(engine.all_reduce_sum(own))
        advantages = estimates.advantages
        if ppo.normalize_advantages:
            advantages = whiten(advantages, mean, std)
        tokens = len(sample.tensor("input_ids"))
        spread = spread_over_tokens(advantages, estimates.responses.tokens, tokens)
        notes = _notes(sample, spread, context)
        means = update_actor(engine, sample, spread, context)
        return replace(global_result({**stats, **means}, "actor"), notes=notes)


class RecomputeInterface(Interface):
    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """The training engine's log-probabilities of the completions, as ``old_logprobs``. Reports
        the mean and largest absolute difference to those of generation, over response tokens, and
        the mismatch of the two policies."""
        assert engine is not None
        sample = sample.to(engine.context.device)
        output = _logprobs(engine, sample, context, OLD_LOGPROBS)
        response = ~sample.tensor("prompt_mask")
        distance = (output.tensor(OLD_LOGPROBS) - sample.tensor("logprobs")).abs().double()
        distance = torch.where(response, distance, 0.0)
        sums = mismatch_sums(output.tensor(OLD_LOGPROBS), sample.tensor("logprobs"), response)
        largest = distance.max() if len(distance) else distance.sum()
        maxima = torch.stack([largest, sums.pop(RATIO_MAX)])
        totals = torch.stack([distance.sum(), response.sum().double(), *sums.values()])
        engine.all_reduce_max(maxima)
        engine.all_reduce_sum(totals)
        most, ratio, total, tokens, *rest = torch.cat([maxima, totals]).tolist()
        mismatch = {RATIO_MAX: ratio, **dict(zip(sums, rest, strict=True))}
        means = {
            "logprob_difference_mean": total / max(tokens, 1.0),
            "logprob_difference_max": most,
            **mismatch_metrics(mismatch, tokens),
        }
        # They are the same on all ranks, whose mean is reported.
        return CallResult(output, {name: (mean, 1.0) for name, mean in means.items()})


def _notes(
    sample: SequenceSample, advantages: Tensor, context: CallContext
) -> list[dict[str, Any]]:
    """``advantages`` [T] as the losses have them."""
    settings = cast(PolicyGradient, context.settings.algorithm)
    values = {"advantages": advantages, "logprobs": old_logprobs(sample)}
    trained = trained_completions(sample, settings)
    return token_notes(sample, values, trained, context.settings.config.logging)


def _logprobs(
    engine: TrainEngine | None, sample: SequenceSample, context: CallContext, key: str
) -> SequenceSample:
    """The engine's log-probabilities of all tokens under ``key``."""
    assert engine is not None
    temperature = context.settings.config.rollout.temperature
    outputs = engine.forward(sample.only(read_by_models(sample)), temperature=temperature)
    data: dict[str, Tensor | None] = {key: outputs["logp"]}
    return SequenceSample(sample.ids, {key: sample.lengths["input_ids"]}, data=data)


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
