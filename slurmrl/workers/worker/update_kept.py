"""The share of each update of the actor that the weights have that generate.

They may be of a narrower type, in which a small update disappears until several add up: generation
then samples from older weights, plus rounding. The share is that of exports (see
`slurmrl.weights.survival`), of an equally spaced part of this rank's weights.
"""

from __future__ import annotations

from typing import Final

import torch

from slurmrl.algorithms.base import Stats
from slurmrl.engines.base import Engine
from slurmrl.graph.call import Method
from slurmrl.layout.copy import Array
from slurmrl.plan.metrics import UPDATE_KEPT
from slurmrl.plan.model import CallPlan, Plan
from slurmrl.plan.precision import rounds_to
from slurmrl.plan.settings import Settings
from slurmrl.weights.survival import survival

ACTOR: Final = "actor"
MOST: Final = 2**18
"""Weights of a rank that are compared."""


class UpdateKept:
    """Measures the actor's updates in the type of generation."""

    def __init__(self, dtype: str | None = None) -> None:
        """``dtype``: None measures nothing."""
        self._dtype = dtype

    @staticmethod
    def of(settings: Settings, plan: Plan) -> UpdateKept:
        generates = any(call.method is Method.GENERATE for call in plan.calls)
        return UpdateKept(rounds_to(settings.config) if generates else None)

    def before(self, call: CallPlan, engine: Engine | None) -> Array | None:
        """Return weights to compare with those after the call; None if it is not measured."""
        trains = call.method is Method.TRAIN_STEP and call.role == ACTOR
        return _part_of(engine) if self._dtype and engine is not None and trains else None

    def stats(self, before: Array, engine: Engine | None) -> Stats:
        """Return the share of the update since ``before``, as statistics of a training call; none
        without an update."""
        assert self._dtype is not None, "there are weights to compare with"
        assert engine is not None, "there are weights to compare with"
        share = survival(before, _part_of(engine), self._dtype).share
        return {} if share is None else {UPDATE_KEPT: (share, 1.0)}


def _part_of(engine: Engine) -> Array:
    parts = engine.updated(MOST)
    joined = torch.cat(parts) if parts else torch.empty(0)
    array: Array = joined.clone().cpu().numpy()
    return array
