"""The actor's updates of a step, given the advantages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.policy.advantages import old_logprobs, trained_completions
from slurmrl.algorithms.policy.aggregation import LOSS_WEIGHTS, token_weights
from slurmrl.algorithms.policy.correction import correction_weights, mismatch_sums
from slurmrl.algorithms.policy.loss import PolicyTargets, policy_loss
from slurmrl.algorithms.policy.schema import OLD_LOGPROBS, REF_LOGPROBS, PolicyGradient
from slurmrl.algorithms.policy.second_moment import second_moment_mask
from slurmrl.algorithms.policy.sequences import Sequences
from slurmrl.algorithms.policy.updates import MeanStats, run_updates
from slurmrl.data.sample import SequenceSample
from slurmrl.data.support import EXPERTS, IDS, SIZES

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine

MASK = "response_mask"


def update_actor(
    engine: TrainEngine, sample: SequenceSample, advantages: Tensor, context: CallContext
) -> MeanStats:
    """Make the updates of a step. ``advantages`` [T] are 0 on prompts.

    During the critic's warm-up no update is made: the first minibatch's gradient is computed for
    its metrics and dropped, so the optimizer and its schedule do not advance.
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
            actor_loss,
            settings=settings,
            kl_coef=context.scalars["kl_coef"],
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


def actor_loss(
    outputs: dict[str, Tensor],
    batch: SequenceSample,
    settings: PolicyGradient,
    *,
    kl_coef: float = 0.0,
    compares: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The engine's loss function: outputs {logp, entropy} [T]. With ``compares``, the old
    log-probabilities are generation's, and its statistics compare them with the outputs."""
    logp, mask = outputs["logp"], batch.tensor(MASK)
    targets = PolicyTargets(
        batch.tensor("logprobs"),
        batch.tensor("advantages"),
        mask,
        Sequences.of(batch.cu_seqlens("input_ids"), mask.device),
        weights=batch.data.get(LOSS_WEIGHTS),
        corrections=batch.data.get("corrections"),
        kept=batch.data.get("kept"),
        ref_logp=batch.data.get(REF_LOGPROBS),
    )
    loss, stats = policy_loss(
        logp,
        outputs["entropy"],
        targets,
        settings,
        kl_coef=kl_coef,
        kl_estimator=settings.kl.estimator,
    )
    if compares:
        stats |= mismatch_sums(logp.detach(), targets.old_logp, mask)
    return loss, stats


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
        behaviour = sample.tensor("logprobs")
        data["corrections"] = correction_weights(old, behaviour, mask, sequences, settings)
    lengths = dict.fromkeys(data, sample.lengths["input_ids"])
    training = SequenceSample(sample.ids, lengths, data=data)
    training.update_(sample.only(read_by_models(sample)))
    return training


def read_by_models(sample: SequenceSample) -> list[str]:
    """The keys with which a language model computes log-probabilities as generation did."""
    return [key for key in ("input_ids", SIZES, IDS, EXPERTS) if key in sample.keys]


def _stop(settings: PolicyGradient) -> Callable[[MeanStats], bool] | None:
    """The test of a minibatch's means that ends the updates of a step."""
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
    """What adds to a minibatch the tokens that M2PO keeps, by the current weights."""
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
