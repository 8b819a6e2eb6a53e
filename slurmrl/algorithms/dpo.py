"""DPO: losses of pairs, for training and for held-out pairs. P is the number of pairs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.pairs import (
    PairInterface,
    PairValues,
    pair_stats,
    pair_weights,
    split_pairs,
    tied,
)
from slurmrl.algorithms.preference_schema import DPO, PAIR_METRICS
from slurmrl.algorithms.sequences import answer_lengths, answer_logprobs
from slurmrl.data.sample import SequenceSample

if TYPE_CHECKING:
    from slurmrl.engines.base import LossFn


class DPOInterface(PairInterface):
    metrics = PAIR_METRICS
    item_metrics = ("rewards/accuracies", "rewards/margins")

    def loss_fn(self, context: CallContext) -> LossFn:
        return partial(dpo_loss, dpo=cast(DPO, context.settings.algorithm))

    def scores(
        self, outputs: dict[str, Tensor], batch: SequenceSample, context: CallContext
    ) -> Tensor:
        """The implicit rewards."""
        dpo = cast(DPO, context.settings.algorithm)
        return dpo.beta * _log_ratios(answer_logprobs(outputs["logp"], batch), batch, dpo)


def dpo_loss(
    outputs: dict[str, Tensor], batch: SequenceSample, dpo: DPO
) -> tuple[Tensor, dict[str, Tensor]]:
    """The engine's loss function: outputs {logp, entropy} [T]. Sums over the items."""
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
    """[S]: log(p / p_ref) of the answers."""
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
