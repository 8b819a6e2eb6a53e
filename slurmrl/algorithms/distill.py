"""The teacher's log-probabilities, and the actor's step towards the teacher."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.sequences import (
    TOKENS,
    global_means,
    sequence_sums,
    train_on_batch,
)
from slurmrl.algorithms.supervised_schema import DISTILL_METRICS, Distill
from slurmrl.data.sample import SequenceSample
from slurmrl.plan.dataflow import Record

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine

LARGEST_LOG = 80.0
"""Maximum of a log-ratio: the exponential of a larger one would overflow."""


class DistillInterface(Interface):
    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """``teacher_logprobs`` of all tokens, at the sampling temperature.

        Report their mean over response tokens, and the mean of log(p / p_teacher), where p is the
        probability at generation. In an evaluation, also record the sum of log(p / p_teacher) and
        the number of response tokens of each completion.
        """
        assert engine is not None
        outputs = engine.forward(sample.only([TOKENS]), temperature=_temperature(context))
        logp = outputs["logp"]
        response = ~sample.tensor("prompt_mask").to(logp.device)
        distance = sample.tensor("logprobs").to(logp.device) - logp
        sums = [torch.where(response, x, 0.0).double().sum() for x in (distance, logp)]
        kl, total, tokens = torch.stack([*sums, response.sum().double()]).tolist()
        return CallResult(
            SequenceSample(
                sample.ids,
                {"teacher_logprobs": sample.lengths[TOKENS]},
                data={"teacher_logprobs": logp},
            ),
            {"reverse_kl": (kl, tokens), "teacher_logprob": (total, tokens)},
            records=_records(sample, distance, response) if context.evaluation else {},
        )

    def train_step(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """One update with the mean over all response tokens."""
        assert engine is not None
        options = cast(Distill, context.settings.algorithm)
        tokens = float((~sample.tensor("prompt_mask")).sum())
        means, result = train_on_batch(
            engine,
            sample,
            partial(distill_loss, options=options),
            tokens,
            temperature=_temperature(context),
        )
        own = {name: result[name] / result["denominator"] for name in DISTILL_METRICS}
        return global_means({**means, **own})


def _records(sample: SequenceSample, distance: Tensor, response: Tensor) -> dict[str, Record]:
    """Return each item's lists of its completions' sums of ``distance`` [T] and of token counts."""
    ends = sample.cu_seqlens(TOKENS)
    sums = iter(sequence_sums(distance, response, ends).tolist())
    tokens = iter(sequence_sums(response.float(), response, ends).tolist())
    return {
        name: {
            "reverse_kl": [next(sums) for _ in item],
            "tokens": [int(next(tokens)) for _ in item],
        }
        for name, item in zip(sample.ids, sample.lengths[TOKENS], strict=True)
    }


def distill_loss(
    outputs: dict[str, Tensor], batch: SequenceSample, options: Distill
) -> tuple[Tensor, dict[str, Tensor]]:
    """The engine's loss function: outputs {logp, entropy} [T]. Sums over the response tokens.

    The value of a token is the estimate w log(p / p_teacher) of KL(p || p_teacher) at its state.
    The gradient is the score-function gradient, w log(p / p_teacher) grad log p. The importance
    weights w have no gradient.
    """
    logp = outputs["logp"]
    response = ~batch.tensor("prompt_mask")
    now = logp.detach()
    ratio = torch.where(response, now - batch.tensor("logprobs"), 0.0).clamp(max=LARGEST_LOG).exp()
    cap = options.importance_cap
    weight = ratio if cap is None else ratio.clamp(max=cap)
    divergence = weight * (now - batch.tensor("teacher_logprobs"))
    losses = divergence * (1.0 + logp - now)
    stats = {
        "entropy": torch.where(response, outputs["entropy"], 0.0).sum(),
        "importance_ratio": torch.where(response, ratio, 0.0).sum(),
    }
    return torch.where(response, losses, 0.0).sum(), stats


def _temperature(context: CallContext) -> float:
    """The temperature at which the tokens were sampled."""
    config = context.settings.config
    if context.evaluation and config.evaluation is not None:
        return config.evaluation.temperature
    return config.rollout.temperature
