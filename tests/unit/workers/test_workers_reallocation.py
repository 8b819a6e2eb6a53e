"""When weights move, after which moves they are compared, and where models are meanwhile."""

from __future__ import annotations

from typing import Any, cast

import pytest

from slurmrl.parallel.activity import Activity
from slurmrl.plan.model import Reallocation
from slurmrl.workers.worker.reallocation import PreparedMove, Reallocations, Verify
from slurmrl.workers.worker.residence import Residence

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


def test_discarded_weights_move_again(move: FakeMove) -> None:
    reallocations = made(move)
    reallocations.run(HOOK)
    reallocations.discarded("rollout")
    reallocations.run(HOOK)
    assert move.verified == [True, False]


class FakeEngine:
    def __init__(self) -> None:
        self.away = False

    def offload(self) -> None:
        self.away = True

    def onload(self) -> None:
        self.away = False


def test_offloaded_models_are_there_only_while_they_are_used() -> None:
    """Other models stay; a rank without a part of a model has nothing to do for it."""
    engines = {name: FakeEngine() for name in ("actor", "critic")}
    residence = Residence(cast(Any, engines), {"actor", "rollout"})
    assert (engines["actor"].away, engines["critic"].away) == (True, False)
    with residence.using("rollout"), residence.using("actor", "critic"):
        assert not engines["actor"].away
    assert (engines["actor"].away, engines["critic"].away) == (True, False)


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
