"""A frozen reward model's scores of completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slurmrl.algorithms.base import CallContext, CallResult, Interface
from slurmrl.algorithms.sequences import TOKENS, last_values, per_sequence
from slurmrl.data.sample import SequenceSample

if TYPE_CHECKING:
    from slurmrl.engines.base import TrainEngine


class ScoresInterface(Interface):
    def inference(
        self, engine: TrainEngine | None, sample: SequenceSample, context: CallContext
    ) -> CallResult:
        """``model_scores``: the value at the last token of each sequence. Reports their mean."""
        assert engine is not None
        scores = last_values(engine.forward(sample.only([TOKENS]))["values"], sample)
        stats = {"model_score": (float(scores.double().sum()), float(len(scores)))}
        return CallResult(per_sequence(sample, "model_scores", scores), stats)
