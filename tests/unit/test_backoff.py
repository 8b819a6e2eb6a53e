from __future__ import annotations

import random

from slurmrl.backoff import Backoff


def test_pauses_grow_to_the_last_and_start_again_after_a_reset() -> None:
    slept: list[float] = []
    backoff = Backoff(0.001, 0.05, sleep=slept.append)
    for _ in range(30):
        backoff.sleep()
    assert 0.00075 <= slept[0] <= 0.001
    assert all(0.0375 <= pause <= 0.05 for pause in slept[15:])
    assert len(set(slept[15:])) > 1
    backoff.reset()
    assert backoff.next_s() <= 0.001


def test_the_global_random_numbers_are_not_touched() -> None:
    random.seed(1)
    expected = random.random()
    random.seed(1)
    Backoff().next_s()
    assert random.random() == expected
