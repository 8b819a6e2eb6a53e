"""When the ranks executed the calls of the newest steps, and their memory: ``timeline.json``.

It is for reports. It is replaced at most every few seconds, so the end of an incarnation that dies
may be missing.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurmrl import log
from slurmrl.backoff import Interval
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio import atomic
from slurmrl.plan.model import CallPlan
from slurmrl.workers.master.step_metrics import Answered
from slurmrl.workers.messages import Done

logger = log.get(__name__)

STEPS = 10
MOST_CALLS = 50
"""Of a step; a filter may need many rounds."""
MOST_RANKS = 64
"""With these limits the file has about a megabyte at most."""
EVERY_S = 10.0


class Timeline:
    """Holds the newest steps of this incarnation."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._steps: deque[dict[str, Any]] = deque(maxlen=STEPS)
        self._peaks: dict[int, int] = {}
        self._writes = Interval(EVERY_S, clock)

    def add(self, step: int, answered: Answered) -> None:
        calls = [_call(call, answers) for call, answers in answered[:MOST_CALLS]]
        self._steps.append({"step": step, "calls": calls})
        for _, answers in answered:
            for rank, done in answers.items():
                self._peaks[rank] = max(done.peak_bytes, self._peaks.get(rank, 0))
        if self._writes.due():
            self.write()

    def write(self) -> None:
        """Replace the file. A report without it is no reason to end the run."""
        if not self._steps:
            return
        peaks = sorted(self._peaks.items())[:MOST_RANKS]
        value = {"steps": list(self._steps), "peaks": peaks}
        try:
            atomic.replace(self._path, json.dumps(value).encode(), durable=False)
        except EnvironmentFailure as error:
            logger.warning("the timeline was not written: %s", error)


def _call(call: CallPlan, answers: Mapping[int, Done]) -> dict[str, Any]:
    """``ranks`` are (rank, begin in seconds since the epoch, seconds)."""
    ranks = [
        (rank, round(answers[rank].began, 4), round(answers[rank].seconds, 4))
        for rank in call.ranks[:MOST_RANKS]
    ]
    return {"name": call.name, "ranks": ranks}
