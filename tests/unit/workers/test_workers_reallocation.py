"""When weights move, and after which moves they are compared."""

from __future__ import annotations

from typing import Any, cast

import pytest

from slurmrl.parallel.activity import Activity
from slurmrl.plan.model import Reallocation
from slurmrl.workers.worker.reallocation import PreparedMove, Reallocations, Verify

HOOK = Reallocation(source="actor", target="rollout")


class FakeMove:
    def __init__(self) -> None:
        self.verified: list[bool] = []

    def run(self, *, verify: bool) -> None:
        self.verified.append(verify)


@pytest.fixture
def move() -> FakeMove:
    return FakeMove()


def made(move: FakeMove, verify: Verify = "first") -> Reallocations:
    moves: Any = {HOOK: cast(PreparedMove, move)}
    return Reallocations(moves, verify, Activity())


def test_weights_move_at_first_and_after_each_training(move: FakeMove) -> None:
    """An evaluation after a step's generation finds them in place."""
    reallocations = made(move)
    counts = []
    for trained in ("", "actor", "critic", "actor"):
        if trained:
            reallocations.trained(trained)
        reallocations.run(HOOK)
        reallocations.run(HOOK)
        counts.append(len(move.verified))
    assert counts == [1, 2, 2, 3]


@pytest.mark.parametrize(
    ("verify", "verified"),
    [
        ("first", [True, False, False]),
        ("always", [True, True, True]),
        ("never", [False, False, False]),
    ],
)
def test_moves_are_verified_as_configured(
    move: FakeMove, verify: Verify, verified: list[bool]
) -> None:
    reallocations = made(move, verify)
    for _ in range(3):
        reallocations.run(HOOK)
        reallocations.trained("actor")
    assert move.verified == verified
