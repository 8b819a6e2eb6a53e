"""DPO's training step and its measures on held-out pairs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.dpo.loss import pair_losses
from slurmrl.algorithms.dpo.schema import DPO, PAIR_METRICS
from slurmrl.algorithms.pairs import PairValues, pair_stats, pair_weights, split_pairs
from slurmrl.algorithms.sequences import (
    TOKENS,
    answer_lengths,
    answer_logprobs,
    global_means,
    train_on_batch,
)
from slurmrl.data.sample import SequenceSample

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine


class DPOInterface(Interface):
    def train_step(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """One update with the mean loss of each prompt's pairs, averaged over the prompts."""
        assert engine is not None
        dpo = cast(DPO, context.settings.algorithm)
        loss_fn = partial(dpo_loss, dpo=dpo)
        means, result = train_on_batch(engine, sample, loss_fn, float(sample.bs))
        own = {name: result[name] / result["denominator"] for name in PAIR_METRICS}
        return global_means({**means, **own})

    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """The loss and the metrics of held-out pairs; no output keys."""
        assert engine is not None
        dpo = cast(DPO, context.settings.algorithm)
        outputs = engine.forward(sample.only([TOKENS]))
        loss, stats = dpo_loss(outputs, sample.to(outputs["logp"].device), dpo)
        sums = {"loss": loss, **stats}
        return CallResult(stats={key: (float(sums[key]), float(sample.bs)) for key in sums})


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
