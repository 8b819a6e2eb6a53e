"""SFT and on-policy distillation: training steps, held-out losses, rows of the samples table."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.sequences import (
    TOKENS,
    global_means,
    sequence_sums,
    token_notes,
    token_texts,
    train_on_batch,
)
from slurmrl.algorithms.supervised_schema import DISTILL_METRICS, Distill
from slurmrl.data.sample import SequenceSample
from slurmrl.plan.dataflow import Record

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine


FIRST, EVERY = 10, 100
"""Samples are kept of the first ``FIRST`` steps, then of every ``EVERY``-th step: SFT may have many
short steps."""
LONGEST = 20_000
"""Maximum number of characters of a kept string: rows of SFT may be as long as the model's context.
"""


class SFTInterface(Interface):
    def train_step(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Make one update with the mean cross entropy of the answers' tokens."""
        assert engine is not None
        tokens = float((~sample.tensor("prompt_mask")).sum())
        means, _ = train_on_batch(engine, sample, sft_loss, tokens)
        return replace(global_means(means), texts=rows_of(sample, context))

    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Return the held-out ``loss`` per answer token; no output keys.

        The records have the log-probability and the number of tokens of each answer.
        """
        assert engine is not None
        outputs = engine.forward(sample.only(["input_ids"]))
        logp, ends = outputs["logp"], sample.cu_seqlens("input_ids")
        mask = ~sample.tensor("prompt_mask").to(logp.device)
        loss = cross_entropy(logp, mask)
        sums = sequence_sums(logp, mask, ends).tolist()
        tokens = sequence_sums(mask.float(), mask, ends).tolist()
        return CallResult(
            stats={"loss": (float(loss), float(mask.sum()))},
            records={
                name: {"logprob": logprob, "tokens": int(count)}
                for name, logprob, count in zip(sample.ids, sums, tokens, strict=True)
            },
        )


def sft_loss(outputs: dict[str, Tensor], batch: SequenceSample) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of the loss over answer tokens. ``outputs``: {logp, entropy} [T]."""
    return cross_entropy(outputs["logp"], ~batch.tensor("prompt_mask")), {}


def cross_entropy(logp: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of -log p over the tokens that ``mask`` selects; both are [T] and aligned."""
    return -torch.where(mask, logp, 0.0).sum()


def rows_of(sample: SequenceSample, context: CallContext) -> list[dict[str, Any]]:
    """Return the first `logging.samples` sequences as rows of the samples table, or [].

    The completion of a row begins with the first token of an answer. A row marks the tokens outside
    of the loss. Most steps have no rows (`FIRST`, `EVERY`).
    """
    kept = context.settings.config.logging
    if context.step > FIRST and context.step % EVERY:
        return []
    sample = sample.slice(0, min(kept.samples, len(sample.ids)))
    everything = torch.ones(len(sample.ids), dtype=torch.bool)
    told = zip(
        token_texts(sample, kept, context.tokenizer),
        token_notes(sample, {}, everything, kept),
        strict=True,
    )
    tokens = [{**texts, "values": note["values"]} for texts, note in told]
    ids, read = (sample.tensor(key).tolist() for key in ("input_ids", "prompt_mask"))
    rows = []
    for number, (start, stop) in enumerate(pairwise(sample.cu_seqlens("input_ids").tolist())):
        first = next((at for at in range(start, stop) if not read[at]), stop)
        row = {
            "id": sample.ids[number],
            "prompt": _cut(context.tokenizer.decode(ids[start:first])),
            "completion": _cut(context.tokenizer.decode(ids[first:stop])),
        }
        rows.append(row | (tokens[number] if tokens else {}))
    return rows


def _cut(decoded: str | list[str]) -> str:
    text = str(decoded)
    left = len(text) - LONGEST
    return text if left <= 0 else f"{text[:LONGEST]} … ({left} more characters)"


LARGEST_LOG = 80.0
"""Maximum of a log-ratio: the exponential of a larger log-ratio would overflow."""


class DistillInterface(Interface):
    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Return ``teacher_logprobs`` of all tokens, at the sampling temperature.

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
        """Make one update with the mean loss over all response tokens."""
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
    """Return each item's record: the sum of ``distance`` and the token count of each completion."""
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
    """Return loss and statistics, both sums over response tokens. ``outputs``: {logp, entropy} [T].

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
    """Return the temperature at which the tokens were sampled."""
    config = context.settings.config
    if context.evaluation and config.evaluation is not None:
        return config.evaluation.temperature
    return config.rollout.temperature
