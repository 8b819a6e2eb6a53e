"""The time-out of collectives."""

from __future__ import annotations

from datetime import timedelta

import pytest

from slurmrl.workers.worker.distributed import collective_timeout


@pytest.mark.parametrize(("step_timeout_s", "minutes"), [(60.0, 30), (1800.0, 35), (7200.0, 125)])
def test_the_deadline_of_a_call_comes_before_that_of_a_collective(
    step_timeout_s: float, minutes: int
) -> None:
    assert collective_timeout(step_timeout_s) == timedelta(minutes=minutes)
