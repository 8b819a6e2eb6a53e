from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurmrl import backoff as backoff_module
from slurmrl.backoff import READ_S, Backoff, Interval, attempts, retry
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio.calls import explain


def test_pauses_grow_to_the_maximum_and_reset() -> None:
    slept: list[float] = []
    backoff = Backoff(0.001, 0.05, sleep=slept.append)
    for _ in range(30):
        backoff.sleep()
    assert 0.00075 <= slept[0] <= 0.001
    assert all(0.0375 <= pause <= 0.05 for pause in slept[15:])
    assert len(set(slept[15:])) > 1
    backoff.reset()
    assert backoff.next_s() <= 0.001


def test_global_random_state_is_unchanged() -> None:
    random.seed(1)
    expected = random.random()
    random.seed(1)
    Backoff().next_s()
    assert random.random() == expected


def test_interval_is_due_once_per_period() -> None:
    now = [100.0]
    at_once, later = Interval(5.0, lambda: now[0]), Interval(5.0, lambda: now[0], after_s=2.0)
    assert [at_once.due(), at_once.due(), later.due()] == [True, False, False]
    now[0] += 2.0
    assert [later.due(), later.due(), at_once.due()] == [True, False, False]
    now[0] += 20.0
    assert [at_once.due(), at_once.due()] == [True, False]


def test_retry_pauses_only_between_attempts() -> None:
    slept: list[float] = []
    seen = [(last, len(slept)) for last in attempts((1.0, 2.0), slept.append)]
    assert seen == [(False, 0), (False, 1), (True, 2)]
    assert slept == [1.0, 2.0]
    assert list(attempts(())) == [True]


@pytest.mark.parametrize("number", [errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENOTDIR])
def test_retry_ends_if_a_file_was_replaced_by_something_else(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The retry waits without a time limit for a directory that does not answer."""
    now = [0.0]
    monkeypatch.setattr(backoff_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    raised: list[int] = []

    def write() -> str:
        if not raised:
            return "written"
        error = OSError(raised.pop(0), "x")
        raise explain(error, "write", Path("x")) from error

    def pause(seconds: float) -> None:
        now[0] += seconds

    raised[:] = [*[errno.EIO] * 99, *[number] * 2]
    assert retry("write", write, pause) == "written"
    assert now[0] > 10 * READ_S
    began, raised[:] = now[0], [*[errno.EIO] * 9, *[number] * 99]
    with pytest.raises(EnvironmentFailure, match=os.strerror(number)):
        retry("write", write, pause)
    assert READ_S <= now[0] - began < 5 * READ_S
