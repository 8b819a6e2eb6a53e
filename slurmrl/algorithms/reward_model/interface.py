"""A reward model's training step and its measures on held-out pairs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from torch import Tensor
from torch.nn.functional import logsigmoid

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.pairs import PairValues, pair_stats, pair_weights, split_pairs
from slurmrl.algorithms.reward_model.schema import SCORE_METRICS, RewardModel
from slurmrl.algorithms.sequences import TOKENS, global_means, last_values, train_on_batch
from slurmrl.data.sample import SequenceSample

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine


class RewardModelInterface(Interface):
    def train_step(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """One update with the mean loss of each prompt's pairs, averaged over the prompts."""
        assert engine is not None
        loss_fn = partial(score_loss, options=cast(RewardModel, context.settings.algorithm))
        means, result = train_on_batch(engine, sample, loss_fn, float(sample.bs))
        own = {name: result[name] / result["denominator"] for name in SCORE_METRICS}
        return global_means({**means, **own})

    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """The loss and the metrics of held-out pairs; no output keys."""
        assert engine is not None
        options = cast(RewardModel, context.settings.algorithm)
        outputs = engine.forward(sample.only([TOKENS]))
        loss, stats = score_loss(outputs, sample, options)
        sums = {"loss": loss, **stats}
        return CallResult(stats={key: (float(sums[key]), float(sample.bs)) for key in sums})


def score_loss(
    outputs: dict[str, Tensor], batch: SequenceSample, options: RewardModel
) -> tuple[Tensor, dict[str, Tensor]]:
    """The engine's loss function: outputs {values} [T]. Sums over the items."""
    scores = split_pairs(last_values(outputs["values"], batch))
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
