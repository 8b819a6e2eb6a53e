"""Tests of the time of weight moves, of their verification, and of the places of models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slurmrl.plan.model import Reallocation
from slurmrl.tensors.layout import Box, Layout, Shard, TensorSpec
from slurmrl.tensors.ops import intervals
from slurmrl.tensors.parallel.groups import Activity
from slurmrl.tensors.transfer.execute import BoxCopies
from slurmrl.tensors.transfer.plan import PlacedLayout, plan_move
from slurmrl.workers.worker import reallocation
from slurmrl.workers.worker.reallocation import PreparedMove, Reallocations, Residence, Verify

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


def test_copy_intervals_are_computed_once_for_all_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The intervals depend only on the layouts, so the second move of a plan computes none."""
    monkeypatch.setattr(reallocation.dist, "get_rank", lambda: 0)
    source, target = torch.randn(6, 128), torch.zeros(6, 256)

    def columns(storage: Tensor, first: int) -> tuple[PlacedLayout, Any]:
        """Return 128 columns of a storage, in the form of an engine."""
        shard = Shard("w", Box.whole((6, 128)), "w", first, storage.stride())
        layout = Layout.of({"w": TensorSpec((6, 128), "float32")}, [[shard]])
        return PlacedLayout(layout, (0,)), SimpleNamespace(storages=lambda: {"w": storage})

    (held, trained), (taken, averaged) = columns(source, 0), columns(target, 64)
    cpu = torch.device("cpu")
    average = Reallocation(source="actor", target="ref", eta=0.5)
    plan, copies = (
        plan_move(held, taken, hosts={0: 0}, budget=1 << 20),
        BoxCopies(cpu, kernels=True),
    )
    group = cast(dist.ProcessGroup, None)
    prepared = PreparedMove(average, (trained, averaged), (held, taken), plan, group, cpu, copies)
    scatter = mock.Mock(side_effect=intervals.scatter)
    monkeypatch.setattr("slurmrl.tensors.transfer.execute.scatter", scatter)
    prepared.run(verify=False)
    monkeypatch.setattr("slurmrl.tensors.transfer.execute.Intervals.of", None)
    prepared.run(verify=False)
    assert scatter.call_count == 2
    torch.testing.assert_close(target[:, 64:192], 0.75 * source)


def test_weights_move_at_the_start_and_after_each_training(move: FakeMove) -> None:
    """An evaluation after a step's generation uses the moved weights."""
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


def test_offloaded_models_are_loaded_only_during_use() -> None:
    """Other models stay loaded. A rank without a part of a model does nothing."""
    engines = {name: FakeEngine() for name in ("actor", "critic")}
    residence = Residence(cast(Any, engines), {"actor", "rollout"})
    assert (engines["actor"].away, engines["critic"].away) == (True, False)
    with residence.using("rollout"), residence.using("actor", "critic"):
        assert not engines["actor"].away
    assert (engines["actor"].away, engines["critic"].away) == (True, False)


def test_moved_weights_stay_until_another_model_computes() -> None:
    """Ranks without a part of the weights get the same information."""
    engines = {name: FakeEngine() for name in ("actor", "rollout")}
    holder, other = (
        Residence(cast(Any, held), {"actor", "rollout"}, {"rollout"})
        for held in (engines, {"actor": FakeEngine()})
    )
    for residence in (holder, other):
        for _ in range(2):
            with residence.using("rollout"), residence.using("actor"):
                pass
            assert residence.make_room("rollout") == set()
    assert (engines["actor"].away, engines["rollout"].away) == (True, False)
    assert [residence.make_room("actor") for residence in (holder, other)] == [{"rollout"}] * 2
    assert engines["rollout"].away
    assert holder.make_room() == set()


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
