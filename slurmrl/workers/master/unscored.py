"""Steps in which the reward gives most completions no score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from slurmrl.errors import RewardError
from slurmrl.plan.metrics import UNSCORED

MOST_SHARE: Final = 0.5
MOST_STEPS: Final = 5


class UnscoredSteps:
    """Counts the newest steps in a row with too few scores."""

    def __init__(self) -> None:
        self._steps = 0

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a step.

        :raises RewardError: there are `MOST_STEPS` of them, or none has a score.
        """
        share = metrics.get(UNSCORED, 0.0)
        self._steps = self._steps + 1 if share > MOST_SHARE else 0
        if self._steps >= MOST_STEPS:
            raise RewardError(
                f"the reward gave no score to {share:.0%} of the completions of this step, and to "
                f"most of those of the {MOST_STEPS - 1} before; the workers' logs say why. "
                "Completions without a score are not trained on: mend the reward or what it needs, "
                "or give such completions a score (reward.pool.unjudged_score)"
            )
