"""DPO, and code for pairs of a chosen and a rejected answer to a prompt.

P pairs are S = 2P sequences. The sequences of an item are chosen, rejected, chosen, rejected, … The
weights of an item's pairs add up to one, so prompts with many pairs count no more than others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.preference_schema import DPO, PAIR_METRICS
from slurmrl.algorithms.sequences import (
    TOKENS,
    answer_lengths,
    answer_logprobs,
    global_means,
    train_on_batch,
)
from slurmrl.data.sample import SequenceSample
from slurmrl.plan.dataflow import Record
from slurmrl.tensors.ops.arguments import upload

if TYPE_CHECKING:
    from slurmrl.engines.base import LossFn, TrainEngine


class PairInterface(Interface):
    """Interface that trains and evaluates a model on pairs by one loss function."""

    metrics: ClassVar[tuple[str, ...]]
    """Names of the loss function's statistics, which are sums over the items."""
    item_metrics: ClassVar[tuple[str, str]] = ("accuracy", "margin")
    """Names of an item's ``accuracies`` and ``margins`` in records (see `pair_stats`)."""

    @abstractmethod
    def loss_fn(self, context: CallContext) -> LossFn: ...

    @abstractmethod
    def scores(
        self, outputs: dict[str, Tensor], batch: SequenceSample, context: CallContext
    ) -> Tensor:
        """Return the values [S] by which chosen and rejected answers are compared."""

    def train_step(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Make one update with the mean loss of each prompt's pairs, averaged over the prompts."""
        assert engine is not None
        means, result = train_on_batch(engine, sample, self.loss_fn(context), float(sample.bs))
        own = {name: result[name] / result["denominator"] for name in self.metrics}
        return global_means({**means, **own})

    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """Return loss and metrics of held-out pairs, with each item's scores; no output keys."""
        assert engine is not None
        outputs = engine.forward(sample.only([TOKENS]))
        batch = sample.to(next(iter(outputs.values())).device)
        loss, stats = self.loss_fn(context)(outputs, batch)
        sums = {"loss": loss, **stats}
        scores = iter(self.scores(outputs, batch, context).tolist())
        return CallResult(
            stats={key: (float(sums[key]), float(sample.bs)) for key in sums},
            records={
                name: self._record([next(scores) for _ in item])
                for name, item in zip(sample.ids, sample.lengths[TOKENS], strict=True)
            },
        )

    def _record(self, scores: Sequence[float]) -> Record:
        """Return the record of an item: the scores of its answers, their accuracy and margin."""
        chosen, rejected = list(scores[0::2]), list(scores[1::2])
        margins = [a - b for a, b in zip(chosen, rejected, strict=True)]
        accuracy = sum(margin > 0 for margin in margins) / len(margins)
        own = zip(self.item_metrics, (accuracy, sum(margins) / len(margins)), strict=True)
        return {"chosen": chosen, "rejected": rejected, **dict(own)}


class PairValues(NamedTuple):
    """Values [P] of the chosen answers and of the rejected answers of P pairs."""

    chosen: Tensor
    rejected: Tensor


def split_pairs(values: Tensor) -> PairValues:
    """Split the values [S] of sequences into values of chosen and of rejected answers."""
    return PairValues(values[0::2], values[1::2])


def tied(values: Tensor, sample: SequenceSample) -> Tensor:
    """Return the values [S]; if both answers of a pair have equal tokens, make their values equal.

    The value of the chosen answer replaces the value of the rejected answer. Otherwise, the margin
    of equal answers would be a rounding error, which depends on the micro-batch, instead of 0.
    """
    cuts = sample.cu_seqlens(TOKENS).long()
    lengths = cuts.diff().view(-1, 2)
    alike = lengths[:, 0] == lengths[:, 1]
    sizes = lengths[:, 0] * alike
    pair = torch.arange(len(sizes)).repeat_interleave(sizes)
    place = torch.arange(len(pair)) + (cuts[:-1:2] - (sizes.cumsum(0) - sizes))[pair]
    indices = (alike.long(), pair, place, place + sizes[pair])
    same, pair, place, other = upload(indices, values.device)
    ids = sample.tensor(TOKENS).to(values.device)
    same = same - torch.zeros_like(same).index_add(0, pair, (ids[place] != ids[other]).long())
    chosen, rejected = split_pairs(values)
    return torch.stack([chosen, torch.where(same == 1, chosen, rejected)], dim=1).flatten()


def pair_weights(sample: SequenceSample, like: Tensor) -> Tensor:
    """Return the weights [P], 1 / (number of pairs of the item), as a tensor like ``like``."""
    counts = [len(item) // 2 for item in sample.lengths[TOKENS]]
    return like.new_tensor([1.0 / count for count in counts for _ in range(count)])


def pair_stats(weights: Tensor, scores: PairValues) -> dict[str, Tensor]:
    """Average statistics over the pairs of each item, and return their sums over the items.

    - ``accuracies``: the share of pairs whose chosen answer scores higher; a tie counts as wrong;
    - ``margins`` of the scores;
    - the scores of ``chosen`` and ``rejected`` answers.
    """
    margins = scores.chosen - scores.rejected
    return {
        "chosen": (weights * scores.chosen).sum(),
        "rejected": (weights * scores.rejected).sum(),
        "margins": (weights * margins).sum(),
        "accuracies": (weights * (margins > 0).to(torch.float32)).sum(),
    }


class DPOInterface(PairInterface):
    metrics = PAIR_METRICS
    item_metrics = ("rewards/accuracies", "rewards/margins")

    def loss_fn(self, context: CallContext) -> LossFn:
        return partial(dpo_loss, dpo=cast(DPO, context.settings.algorithm))

    def scores(
        self, outputs: dict[str, Tensor], batch: SequenceSample, context: CallContext
    ) -> Tensor:
        """Return the implicit rewards [S] of the answers."""
        dpo = cast(DPO, context.settings.algorithm)
        return dpo.beta * _log_ratios(answer_logprobs(outputs["logp"], batch), batch, dpo)


def dpo_loss(
    outputs: dict[str, Tensor], batch: SequenceSample, dpo: DPO
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and statistics, both sums over the items. ``outputs``: {logp, entropy} [T]."""
    sums = answer_logprobs(outputs["logp"], batch)
    ratios = _log_ratios(sums, batch, dpo)
    logps, logratios = split_pairs(sums), split_pairs(ratios)
    weights = pair_weights(batch, sums)
    lengths = answer_lengths(batch).to(sums)
    losses = pair_losses(split_pairs(ratios / lengths if dpo.length_normalized else ratios), dpo)
    if dpo.sft_coef:
        losses = losses - dpo.sft_coef * split_pairs(sums / lengths).chosen
    loss = (weights * losses).sum()
    rewards = PairValues(*(dpo.beta * part.detach() for part in logratios))
    stats = {f"rewards/{name}": value for name, value in pair_stats(weights, rewards).items()}
    stats["logps/chosen"] = (weights * logps.chosen).sum()
    stats["logps/rejected"] = (weights * logps.rejected).sum()
    return loss, stats


def _log_ratios(sums: Tensor, batch: SequenceSample, dpo: DPO) -> Tensor:
    """Return log(p / p_ref) [S] of the answers; without a reference, log p."""
    return tied(sums if dpo.reference_free else sums - batch.tensor("ref_logps"), batch)


def pair_losses(logratios: PairValues, dpo: DPO) -> Tensor:
    """Return the loss [P] of each pair, from log(p / p_ref) of its answers.

    Let h be the log-ratio of the chosen answer minus the log-ratio of the rejected answer, s the
    sigmoid and e the label smoothing:

    - sigmoid: -(1 - e) log s(beta h) - e log s(-beta h) (Rafailov et al. 2023, eq. 7; with e > 0,
      the conservative DPO of Mitchell 2023);
    - ipo: (h - 1 / (2 beta))^2 (Azar et al. 2023, eq. 17);
    - hinge: max(0, 1 - beta h) (Zhao et al. 2023, on log-ratios as in Liu et al. 2023).
    """
    h = logratios.chosen - logratios.rejected
    if dpo.loss == "ipo":
        return (h - 1.0 / (2.0 * dpo.beta)).square()
    if dpo.loss == "hinge":
        return torch.relu(1.0 - dpo.beta * h)
    smoothing = dpo.label_smoothing
    likely, flipped = -logsigmoid(dpo.beta * h), -logsigmoid(-dpo.beta * h)
    return (1.0 - smoothing) * likely + smoothing * flipped
