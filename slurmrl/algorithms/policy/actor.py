"""The actor's training step, and log-probabilities of completions by a training engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.policy.advantages import (
    SumOverRanks,
    estimate,
    moments,
    old_logprobs,
    only_scored,
    spread_over_tokens,
    trained_completions,
    whiten,
)
from slurmrl.algorithms.policy.objective import (
    LOSS_WEIGHTS,
    MASK,
    RATIO_MAX,
    correction_weights,
    mismatch_metrics,
    mismatch_sums,
    policy_loss,
    second_moment_mask,
)
from slurmrl.algorithms.policy.schema import OLD_LOGPROBS, REF_LOGPROBS, PolicyGradient
from slurmrl.algorithms.policy.updates import MeanStats, global_result, run_updates, token_weights
from slurmrl.algorithms.sequences import Sequences, token_notes
from slurmrl.data.meta import EXPERTS, IDS, SIZES
from slurmrl.data.sample import SequenceSample

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine


class ActorInterface(Interface):
    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Return ``ref_logprobs``, the model's log-probabilities of the completions."""
        return CallResult(_logprobs(engine, sample, context, REF_LOGPROBS))

    def train_step(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Compute the advantages of the batch and make the step's updates of the actor."""
        assert engine is not None
        ppo = cast(PolicyGradient, context.settings.algorithm)
        sample = only_scored(sample).to(engine.context.device)
        estimates = estimate(sample, context, engine.all_reduce_sum)
        mean, std = moments(estimates.advantages, engine.all_reduce_sum)
        stats = {"advantages_mean": mean, "advantages_std": std}
        count = torch.tensor(len(sample.tensor("rewards")), dtype=torch.float64)
        stats["completions"] = float(engine.all_reduce_sum(count.to(engine.context.device)))
        if estimates.kl is not None:
            answered = len(estimates.responses.answered)
            stats |= _kl_stats(estimates.kl, answered, engine.all_reduce_sum)
            stats["kl_coef"] = context.scalars["kl_coef"]
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
        """Return ``old_logprobs``, the training engine's log-probabilities of the completions.

        Over response tokens, report mean and maximum of the absolute difference to generation's
        log-probabilities, and the mismatch of the two policies.
        """
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
        # These means are equal on all ranks, so their mean over the ranks is correct.
        return CallResult(output, {name: (mean, 1.0) for name, mean in means.items()})


def _notes(
    sample: SequenceSample, advantages: Tensor, context: CallContext
) -> list[dict[str, Any]]:
    """Return fields for the samples table: advantages and log-probabilities of tokens."""
    settings = cast(PolicyGradient, context.settings.algorithm)
    values = {"advantages": advantages, "logprobs": old_logprobs(sample)}
    trained = trained_completions(sample, settings)
    return token_notes(sample, values, trained, context.settings.config.logging)


def _logprobs(
    engine: TrainEngine | None, sample: SequenceSample, context: CallContext, key: str
) -> SequenceSample:
    """Return a sample with the engine's log-probabilities of all tokens under ``key``."""
    assert engine is not None
    temperature = context.settings.config.rollout.temperature
    outputs = engine.forward(sample.only(read_by_models(sample)), temperature=temperature)
    data: dict[str, Tensor | None] = {key: outputs["logp"]}
    return SequenceSample(sample.ids, {key: sample.lengths["input_ids"]}, data=data)


def _kl_stats(kl: Tensor, sequences: int, all_reduce_sum: SumOverRanks) -> MeanStats:
    """Return the KL of the sampling policy to the reference, in nats.

    ``kl`` is a mean over tokens, ``kl_sequence`` a mean over the ``sequences`` with these tokens.
    Without tokens, the result is empty.
    """
    kl = kl.double()
    sizes = kl.new_tensor([float(len(kl)), float(sequences)])
    total, tokens, completions = all_reduce_sum(torch.cat([kl.sum().reshape(1), sizes])).tolist()
    return {"kl": total / tokens, "kl_sequence": total / completions} if tokens else {}


def update_actor(
    engine: TrainEngine, sample: SequenceSample, advantages: Tensor, context: CallContext
) -> MeanStats:
    """Make the updates of a step. ``advantages`` [T] are 0 on prompts.

    During the critic's warm-up, only compute the first minibatch's gradient for its metrics. Make
    no update, so that the optimizer and its schedule do not advance.
    """
    settings = cast(PolicyGradient, context.settings.algorithm)
    temperature = context.settings.config.rollout.temperature
    warms_up = context.step <= settings.critic_warmup_steps
    generates_old = OLD_LOGPROBS not in sample.keys
    means = run_updates(
        engine,
        _training_sample(sample, advantages, context),
        context,
        MASK,
        partial(
            policy_loss,
            settings=settings,
            kl_coef=context.scalars["kl_coef"],
            kl_estimator=settings.kl.estimator,
            compares=generates_old,
        ),
        settings,
        aggregation=settings.aggregation,
        temperature=temperature,
        stop=(lambda _: True) if warms_up else _stop(settings),
        prepare=_second_moment(engine, settings, temperature),
    )
    if warms_up:
        means["early_stop"] = 0.0
    return means


def _training_sample(
    sample: SequenceSample, advantages: Tensor, context: CallContext
) -> SequenceSample:
    settings = cast(PolicyGradient, context.settings.algorithm)
    written = ~sample.tensor("prompt_mask")
    sequences = Sequences.of(sample.cu_seqlens("input_ids"), written.device)
    mask = written & sequences.spread(trained_completions(sample, settings))
    length = settings.aggregation_length or context.settings.config.rollout.most_written
    old = old_logprobs(sample)
    data: dict[str, Tensor | None] = {
        "logprobs": old,
        MASK: mask,
        "advantages": advantages,
        LOSS_WEIGHTS: token_weights(written, sequences, settings.aggregation, length),
    }
    if settings.penalises_in_loss:
        data[REF_LOGPROBS] = sample.tensor(REF_LOGPROBS)
    if settings.compares:
        behavior = sample.tensor("logprobs")
        data["corrections"] = correction_weights(old, behavior, mask, sequences, settings)
    lengths = dict.fromkeys(data, sample.lengths["input_ids"])
    training = SequenceSample(sample.ids, lengths, data=data)
    training.update_(sample.only(read_by_models(sample)))
    return training


def read_by_models(sample: SequenceSample) -> list[str]:
    """Return the keys that a model needs to compute log-probabilities as generation does."""
    return [key for key in ("input_ids", SIZES, IDS, EXPERTS) if key in sample.keys]


def _stop(settings: PolicyGradient) -> Callable[[MeanStats], bool] | None:
    """Return a function that decides from a minibatch's means whether to stop the updates."""
    limits = {
        "importance_ratio": settings.early_stop_importance_ratio,
        "approx_kl": settings.early_stop_kl,
    }
    tests = [(name, limit) for name, limit in limits.items() if limit is not None]
    if not tests:
        return None
    return lambda means: any(means[name] > limit for name, limit in tests)


def _second_moment(
    engine: TrainEngine, settings: PolicyGradient, temperature: float
) -> Callable[[SequenceSample], SequenceSample] | None:
    """Return a function that computes M2PO's mask ``kept`` at current weights for a minibatch."""
    threshold = settings.m2_threshold
    if threshold is None:
        return None

    def keep(part: SequenceSample) -> SequenceSample:
        logp = engine.forward(part.only(read_by_models(part)), temperature=temperature)["logp"]
        mask = part.tensor(MASK)
        log_ratio = torch.where(mask, logp - part.tensor("logprobs"), 0.0)
        kept = second_moment_mask(
            log_ratio, part.tensor("advantages"), mask, threshold, engine.all_reduce_sum
        )
        lengths = {**part.lengths, "kept": part.lengths[MASK]}
        return SequenceSample(part.ids, lengths, data={**part.data, "kept": kept})

    return keep
