"""The actor's training, and log-probabilities by the reference model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.ppo.advantages import (
    Estimates,
    SumOverRanks,
    estimate,
    moments,
    spread_over_tokens,
    whiten,
)
from slurmrl.algorithms.ppo.loss import policy_loss
from slurmrl.algorithms.ppo.schema import PPO
from slurmrl.algorithms.ppo.updates import MeanStats, global_result, run_updates
from slurmrl.data.sample import SequenceSample

if TYPE_CHECKING:
    from slurmrl.engines.base import Engine


class PPOActorInterface(Interface):
    def inference(
        self, engine: Engine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """The model's log-probabilities of the completions, as ``ref_logprobs``."""
        assert engine is not None
        temperature = context.settings.config.rollout.temperature
        outputs = engine.forward(sample.only(["input_ids"]), temperature=temperature)
        lengths = {"ref_logprobs": sample.lengths["input_ids"]}
        data: dict[str, Tensor | None] = {"ref_logprobs": outputs["logp"]}
        return CallResult(SequenceSample(sample.ids, lengths, data=data))

    def train_step(
        self, engine: Engine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Clipped policy updates on advantages that are normalised over the whole batch."""
        assert engine is not None
        ppo = cast(PPO, context.settings.algorithm)
        sample = sample.to(engine.context.device)
        estimates = estimate(sample, ppo, context.scalars["kl_coef"])
        mean, std = moments(estimates.advantages, engine.all_reduce_sum)
        stats = _kl_stats(estimates, sample.bs, engine.all_reduce_sum)
        stats |= {"advantages_mean": mean, "advantages_std": std}
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


def actor_loss(
    outputs: dict[str, Tensor], batch: SequenceSample, ppo: PPO
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
        "logprobs": sample.tensor("logprobs"),
        "response_mask": ~sample.tensor("prompt_mask"),
        "advantages": spread_over_tokens(advantages, estimates.responses.tokens, len(ids)),
    }
    return SequenceSample(sample.ids, dict.fromkeys(data, rows), data=data)


def _kl_stats(estimates: Estimates, sequences: int, all_reduce_sum: SumOverRanks) -> MeanStats:
    """KL of the sampling policy to the reference: per token, and per completion."""
    kl = estimates.kl.double()
    sizes = kl.new_tensor([float(len(kl)), float(sequences)])
    total, tokens, completions = all_reduce_sum(torch.cat([kl.sum().reshape(1), sizes])).tolist()
    return {"kl": total / max(tokens, 1.0), "kl_sequence": total / max(completions, 1.0)}


def _stop(limit: float | None) -> Callable[[MeanStats], bool] | None:
    """The test of a minibatch's mean probability ratio that ends the updates of a step."""
    return None if limit is None else lambda means: means["importance_ratio"] > limit
