"""A frozen reward model's scores, of completions and of given answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.reward_model.reading import (
    READ,
    pair_values,
    turn_end_values,
    whole_conversations,
)
from slurmrl.algorithms.sequences import TOKENS, last_values, per_sequence
from slurmrl.data.sample import SequenceSample
from slurmrl.plan.model_files import scored_at_turn_end

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine


class ScoresInterface(Interface):
    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """``model_scores``: the score of each completion (see `reading`). Reports their mean."""
        assert engine is not None
        scores = self._scores(engine, sample, context)
        stats = {"model_score": (float(scores.double().sum()), float(len(scores)))}
        return CallResult(per_sequence(sample, "model_scores", scores), stats)

    def _scores(self, engine: TrainEngine, sample: SequenceSample, context: CallContext) -> Tensor:
        if READ not in sample.keys:
            return last_values(_values(engine, sample), sample)
        model = context.settings.config.reward_model
        if model is not None and scored_at_turn_end(model):
            return turn_end_values(_values(engine, sample), sample, context.stop_token_ids)
        whole = whole_conversations(sample, context)
        return last_values(_values(engine, whole), whole)


class PairScoresInterface(ScoresInterface):
    """Scores of the answers of pairs by the actor, which is the reward model."""

    def _scores(self, engine: TrainEngine, sample: SequenceSample, context: CallContext) -> Tensor:
        turn_end = scored_at_turn_end(context.settings.config.actor)
        values = _values(engine, sample)
        return pair_values(values, sample, context.stop_token_ids, turn_end=turn_end)


def _values(engine: TrainEngine, sample: SequenceSample) -> Tensor:
    values: Tensor = engine.forward(sample.only([TOKENS]))["values"]
    return values
