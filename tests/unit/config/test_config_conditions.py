from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmrl.config.schema.config import Frequency, StopWhen
from slurmrl.errors import UsageError


def test_condition_compares_the_metric_of_the_step() -> None:
    reached = StopWhen.parse("eval/reward >= 0.4")
    assert reached.met({"eval/reward": 0.4})
    assert not reached.met({"eval/reward": 0.399})
    assert not reached.met({"reward": 1.0})
    assert not reached.met({"eval/reward": None})
    fallen = StopWhen.parse(" loss<=1e-1 ")
    assert fallen.met({"loss": 0.1})
    assert not fallen.met({"loss": 0.2})


@pytest.mark.parametrize(
    "text", ["", "loss", "loss < 1", "loss == 1", "loss >= nan", "loss >= 1 2", ">= 1", "1 >= loss"]
)
def test_invalid_condition_is_rejected_with_the_rule(text: str) -> None:
    with pytest.raises(UsageError, match="METRIC >= NUMBER"):
        StopWhen.parse(text)


def test_checkpoint_frequency_without_settings_is_never_due() -> None:
    frequency = Frequency()
    assert not any(frequency.check(step, step, float(step)) for step in range(100))


@given(every=st.integers(1, 7), steps=st.integers(0, 50))
def test_step_frequency_is_due_at_its_multiples(every: int, steps: int) -> None:
    frequency = Frequency(every_steps=every)
    due = [step for step in range(1, steps + 1) if frequency.check(step, 0, 0.0)]
    assert due == [step for step in range(1, steps + 1) if step % every == 0]


def test_first_elapsed_interval_is_due_and_restarts_all_intervals() -> None:
    frequency = Frequency(every_steps=10, every_seconds=5.0, every_epochs=1, now_s=100.0)
    assert not frequency.check(1, 0, 104.0)
    assert frequency.check(2, 0, 105.0)
    assert not frequency.check(11, 0, 109.0)
    assert frequency.check(12, 0, 109.5)
    assert frequency.check(13, 1, 110.0)
    assert not frequency.check(14, 1, 110.5)


def test_restored_frequency_is_due_at_the_same_steps() -> None:
    first = Frequency(every_steps=4)
    assert [step for step in range(1, 7) if first.check(step, 0, 0.0)] == [4]
    second = Frequency(every_steps=4)
    second.restore(first.state())
    assert [step for step in range(7, 14) if second.check(step, 0, 0.0)] == [8, 12]
