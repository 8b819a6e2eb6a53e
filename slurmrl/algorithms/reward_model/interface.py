"""A reward model's training step and its measures on held-out pairs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

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
from slurmrl.algorithms.reward_model.schema import SCORE_METRICS, RewardModel
from slurmrl.algorithms.sequences import last_values
from slurmrl.data.sample import SequenceSample

if TYPE_CHECKING:
    from slurmrl.engines.base import LossFn


class RewardModelInterface(PairInterface):
    metrics = SCORE_METRICS

    def loss_fn(self, context: CallContext) -> LossFn:
        return partial(score_loss, options=cast(RewardModel, context.settings.algorithm))

    def scores(
        self, outputs: dict[str, Tensor], batch: SequenceSample, context: CallContext
    ) -> Tensor:
        return tied(last_values(outputs["values"], batch), batch)


def score_loss(
    outputs: dict[str, Tensor], batch: SequenceSample, options: RewardModel
) -> tuple[Tensor, dict[str, Tensor]]:
    """The engine's loss function: outputs {values} [T]. Sums over the items."""
    scores = split_pairs(tied(last_values(outputs["values"], batch), batch))
    weights = pair_weights(batch, scores.chosen)
    loss = (weights * pair_losses(scores, options)).sum()
    stats = pair_stats(weights, PairValues(*(part.detach() for part in scores)))
    names = {
        "accuracies": "accuracy",
        "margins": "margin",
        "chosen": "score_chosen",
        "rejected": "score_rejected",
    }
    return loss, {names[key]: value for key, value in stats.items()}


def pair_losses(scores: PairValues, options: RewardModel) -> Tensor:
    """[P]: -log s(chosen - rejected) (Ouyang et al. 2022, eq. 1), plus the squared sum of both
    scores times ``center_coef`` (Eisenstein et al. 2023, eq. 2)."""
    losses = -logsigmoid(scores.chosen - scores.rejected)
    if options.center_coef:
        losses = losses + options.center_coef * (scores.chosen + scores.rejected).square()
    return losses
