"""A reward model's training step and its measures on held-out pairs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

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
from slurmrl.algorithms.reward_model.reading import pair_values
from slurmrl.algorithms.reward_model.schema import SCORE_METRICS, RewardModel
from slurmrl.algorithms.sequences import last_values
from slurmrl.data.sample import SequenceSample
from slurmrl.plan.model_files import scored_at_turn_end

if TYPE_CHECKING:
    from slurmrl.engines.base import LossFn

ScoreReader: TypeAlias = Callable[[Tensor, SequenceSample], Tensor]
"""The scores [S] of a sample's sequences from the values [T] of its tokens."""


class RewardModelInterface(PairInterface):
    metrics = SCORE_METRICS

    def loss_fn(self, context: CallContext) -> LossFn:
        options = cast(RewardModel, context.settings.algorithm)
        return partial(score_loss, options=options, read=self._reader(context))

    def scores(
        self, outputs: dict[str, Tensor], batch: SequenceSample, context: CallContext
    ) -> Tensor:
        return tied(self._reader(context)(outputs["values"], batch), batch)

    def _reader(self, context: CallContext) -> ScoreReader:
        """A model that is not trained here keeps being read where it was trained."""
        config = context.settings.config
        turn_end = config.total_steps != 0 or scored_at_turn_end(config.actor)
        return partial(pair_values, stops=context.stop_token_ids, turn_end=turn_end)


def score_loss(
    outputs: dict[str, Tensor],
    batch: SequenceSample,
    options: RewardModel,
    *,
    read: ScoreReader = last_values,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The engine's loss function: outputs {values} [T], of which ``read`` takes the scores. Sums
    over the items."""
    scores = split_pairs(tied(read(outputs["values"], batch), batch))
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
