"""Groups of several models in one process world."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from slurmrl.tensors.parallel.groups import build
from slurmrl.tensors.parallel.topology import topology_of
from tests.pool import RankPool

HERE = "tests.distributed.parallel.test_parallel_groups"


@dataclass(frozen=True)
class Model:
    role: str
    ranks: tuple[int, ...]
    sizes: dict[str, int] = field(default_factory=dict)


MODELS = (
    Model("actor", (0, 1, 2, 3), {"dp": 4}),
    Model("critic", (0, 1, 2, 3), {"dp": 2, "tp": 2}),
    Model("ref", (2, 3), {"dp": 2, "tp": 1}),
    Model("reward", (1,), {"dp": 1}),
)


def sums() -> dict[str, tuple[int, int, int, dict[str, float]]]:
    """Per role: dp rank, dp size, model rank, and the sum of global ranks along each axis."""
    rank = dist.get_rank()
    found = {}
    for role, context in build(MODELS, rank=rank, device=torch.device("cpu")).items():
        totals = {}
        for axis in context.groups:
            value = torch.tensor(float(rank))
            dist.all_reduce(value, group=context.group(axis))
            totals[axis] = value.item()
        assert context.mesh.size() == context.dp_size
        assert context.mesh.get_local_rank() == context.dp_rank
        found[role] = (context.dp_rank, context.dp_size, context.rank, totals)
    return found


def waits() -> float:
    """Seconds that a collective of a model may take."""
    made = build(
        MODELS, rank=dist.get_rank(), device=torch.device("cpu"), timeout=timedelta(hours=3)
    )
    group = made["critic"].group("tp")
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


def test_process_groups_have_the_given_timeout(ranks: RankPool) -> None:
    assert ranks(4, f"{HERE}:waits") == [10800.0] * 4


def test_every_rank_finds_its_groups(ranks: RankPool) -> None:
    results = ranks(4, f"{HERE}:sums")
    assert [sorted(result) for result in results] == [
        ["actor", "critic"],
        ["actor", "critic", "reward"],
        ["actor", "critic", "ref"],
        ["actor", "critic", "ref"],
    ]
    for rank, result in enumerate(results):
        assert result["actor"] == (rank, 4, rank, {"dp": 6.0, "shard": 6.0})
    assert results[3]["critic"] == (1, 2, 3, {"dp": 4.0, "tp": 5.0, "shard": 4.0, "data": 5.0})
    assert results[2]["critic"] == (1, 2, 2, {"dp": 2.0, "tp": 5.0, "shard": 2.0, "data": 5.0})
    assert results[3]["ref"] == (1, 2, 1, {"dp": 5.0, "shard": 5.0})
    assert results[1]["reward"] == (0, 1, 0, {"dp": 1.0, "shard": 1.0})


def test_sizes_must_multiply_to_the_number_of_ranks() -> None:
    with pytest.raises(ValueError, match=r"actor: sizes .* need 4 ranks, the plan gives 3"):
        topology_of(Model("actor", (0, 1, 2), {"dp": 4}))
    assert topology_of(Model("ref", (5,))).axes == ("dp",)
