"""KTO: losses of answers for training and evaluation. S is the number of answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.preference_schema import KTO
from slurmrl.algorithms.sequences import (
    TOKENS,
    answer_logprobs,
    global_means,
    nth_sequences,
    train_on_batch,
)
from slurmrl.data.sample import SequenceSample

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine


OWN, MISMATCHED = 0, 1
"""Indices of the two sequences of an item: its own answer and a mismatched answer."""


class KTOInterface(Interface):
    def train_step(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Estimate the KL of the whole batch, then update with the mean loss of all answers."""
        assert engine is not None
        kto = cast(KTO, context.settings.algorithm)
        kl = batch_kl(engine, sample)
        loss_fn = partial(kto_loss, kl=kl, kto=kto)
        own = nth_sequences(sample, OWN)
        means, sums = train_on_batch(engine, own, loss_fn, float(own.bs))
        return global_means({**means, "kl": kl, **_means(sums)})

    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Return loss and metrics of held-out answers, with the scores of each; no output keys."""
        assert engine is not None
        kto = cast(KTO, context.settings.algorithm)
        kl = batch_kl(engine, sample)
        own = nth_sequences(sample, OWN)
        outputs = engine.forward(own.only([TOKENS]))
        batch = own.to(outputs["logp"].device)
        loss, stats = kto_loss(outputs, batch, kl, kto)
        stats |= {"loss": loss, "answers": loss.new_tensor(float(own.bs))}
        total = engine.all_reduce_sum(torch.stack([x.double() for x in stats.values()]))
        sums = dict(zip(stats, total.tolist(), strict=True))
        # These means are equal on all ranks, so their mean over the ranks is correct.
        means = {"loss": sums["loss"] / sums["answers"], "kl": kl, **_means(sums)}
        return replace(global_means(means), records=_records(outputs["logp"], batch, kl, kto))


def batch_kl(engine: TrainEngine, sample: SequenceSample) -> float:
    """Return the estimate of KL(p || p_ref) over the batch of all ranks.

    The estimate is the mean of log(p / p_ref) of the mismatched answers, at least 0 (Ethayarajh et
    al. 2024, section 4.1).
    """
    mismatched = nth_sequences(sample, MISMATCHED)
    logp = engine.forward(mismatched.only([TOKENS]))["logp"]
    ratios = answer_logprobs(logp, mismatched) - mismatched.tensor("ref_logps").to(logp.device)
    own = torch.stack([ratios.double().sum(), ratios.new_tensor(len(ratios)).double()])
    total, count = engine.all_reduce_sum(own)
    return max(0.0, float(total / count))


def kto_loss(
    outputs: dict[str, Tensor], batch: SequenceSample, kl: float, kto: KTO
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and statistics, both sums over the answers. ``outputs``: {logp, entropy} [T]."""
    logps = answer_logprobs(outputs["logp"], batch)
    logratios = logps - batch.tensor("ref_logps")
    desirable = batch.tensor("desirable")
    loss = answer_losses(logratios, desirable, kl, kto).sum()
    return loss, answer_stats(logps.detach(), logratios.detach(), desirable, kl, kto)


def _records(
    logp: Tensor, batch: SequenceSample, kl: float, kto: KTO
) -> dict[str, dict[str, object]]:
    """Return the scores of each item, from the log-probabilities [T] of its tokens."""
    logratios = answer_logprobs(logp, batch) - batch.tensor("ref_logps")
    desirable = batch.tensor("desirable")
    columns = (
        (kto.beta * logratios).tolist(),
        answer_losses(logratios, desirable, kl, kto).tolist(),
        on_their_side(logratios, desirable, kl).tolist(),
        desirable.tolist(),
    )
    return {
        name: {
            "desirable": label,
            "reward": reward,
            f"rewards/{'chosen' if label else 'rejected'}": reward,
            "rewards/accuracies": float(right),
            "loss": loss,
        }
        for name, reward, loss, right, label in zip(batch.ids, *columns, strict=True)
    }


def _means(sums: Mapping[str, float]) -> dict[str, float]:
    """Return metrics from sums over all ranks; omit kinds of answers that are not in the batch."""
    kinds = [kind for kind in ("chosen", "rejected") if sums[f"count/{kind}"]]
    means = {
        f"{name}/{kind}": sums[f"{name}/{kind}"] / sums[f"count/{kind}"]
        for kind in kinds
        for name in ("rewards", "logps")
    }
    means["rewards/accuracies"] = sums["right"] / sum(sums[f"count/{kind}"] for kind in kinds)
    if len(kinds) == 2:
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    return means


def answer_losses(logratios: Tensor, desirable: Tensor, kl: float, kto: KTO) -> Tensor:
    """Return the losses lambda_y - v(x, y) [S] of the answers (Ethayarajh et al. 2024, eq. 8).

    ``logratios`` are log(p / p_ref) of the answers and ``desirable`` (bool) their labels, both [S].
    The value v of a desirable answer is lambda_D s(beta (logratio - kl)). The value of an
    undesirable answer is lambda_U s(beta (kl - logratio)). The reference point ``kl`` has no
    gradient.
    """
    sign = torch.where(desirable, 1.0, -1.0).to(logratios.dtype)
    weight = torch.where(desirable, kto.desirable_weight, kto.undesirable_weight)
    value = torch.sigmoid(kto.beta * sign * (logratios - kl))
    return weight.to(logratios.dtype) * (1.0 - value)


def on_their_side(logratios: Tensor, desirable: Tensor, kl: float) -> Tensor:
    """Return which answers are on the desired side of ``kl`` (bool [S]).

    The log-ratio is greater than ``kl`` for desirable and less for undesirable answers.
    """
    return torch.where(desirable, logratios > kl, logratios < kl)


def answer_stats(
    logps: Tensor, logratios: Tensor, desirable: Tensor, kl: float, kto: KTO
) -> dict[str, Tensor]:
    """Return sums over desirable (``chosen``) and undesirable (``rejected``) answers.

    Each kind has the sum of its implied rewards, the sum of its log-probabilities and its number of
    answers. ``right`` is the number of answers that `on_their_side` selects.
    """
    right = on_their_side(logratios, desirable, kl).sum()
    stats: dict[str, Tensor] = {"right": right.to(logps.dtype)}
    for name, mask in (("chosen", desirable), ("rejected", ~desirable)):
        stats[f"rewards/{name}"] = torch.where(mask, kto.beta * logratios, 0.0).sum()
        stats[f"logps/{name}"] = torch.where(mask, logps, 0.0).sum()
        stats[f"count/{name}"] = mask.sum().to(logps.dtype)
    return stats
