"""DPO's training step and its measures on held-out pairs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from torch import Tensor

from slurmrl.algorithms.base import CallContext
from slurmrl.algorithms.dpo.loss import pair_losses
from slurmrl.algorithms.dpo.schema import DPO, PAIR_METRICS
from slurmrl.algorithms.pairs import (
    PairInterface,
    PairValues,
    pair_stats,
    pair_weights,
    split_pairs,
)
from slurmrl.algorithms.sequences import (
    answer_lengths,
    answer_logprobs,
)
from slurmrl.data.sample import SequenceSample

if TYPE_CHECKING:
    from slurmrl.engines.base import LossFn


class DPOInterface(PairInterface):
    metrics = PAIR_METRICS

    def loss_fn(self, context: CallContext) -> LossFn:
        return partial(dpo_loss, dpo=cast(DPO, context.settings.algorithm))


def dpo_loss(
    outputs: dict[str, Tensor], batch: SequenceSample, dpo: DPO
) -> tuple[Tensor, dict[str, Tensor]]:
    """The engine's loss function: outputs {logp, entropy} [T]. Sums over the items."""
    sums = answer_logprobs(outputs["logp"], batch)
    ratios = sums if dpo.reference_free else sums - batch.tensor("ref_logps")
    logps, logratios = split_pairs(sums), split_pairs(ratios)
    weights = pair_weights(batch, sums)
    scaled = ratios / answer_lengths(batch).to(ratios) if dpo.length_normalized else ratios
    loss = (weights * pair_losses(split_pairs(scaled), dpo)).sum()
    rewards = PairValues(*(dpo.beta * part.detach() for part in logratios))
    stats = {f"rewards/{name}": value for name, value in pair_stats(weights, rewards).items()}
    stats["logps/chosen"] = (weights * logps.chosen).sum()
    stats["logps/rejected"] = (weights * logps.rejected).sum()
    return loss, stats
