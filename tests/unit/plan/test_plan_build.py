from __future__ import annotations

from typing import Any

import pytest

from slurmrl.plan.build import make_plan
from slurmrl.plan.model import Plan
from tests.unit.plan.conftest import Load


@pytest.mark.parametrize(
    ("scheduler", "workers", "overrides", "hosts", "per_host"),
    [
        ("slurm", 1, [], 1, 1),
        ("slurm", 8, [], 1, 8),
        ("slurm", 16, [], 2, 8),
        ("slurm", 8, ["cluster.workers_per_host=1"], 8, 1),
        ("slurm", 12, ["cluster.workers_per_host=4"], 3, 4),
        ("local", 16, [], 1, 16),
        ("local", 2, ["cluster.workers_per_host=1"], 1, 2),
    ],
)
def test_workers_are_placed_on_as_few_hosts_as_possible(
    load_ppo: Load,
    scheduler: str,
    workers: int,
    overrides: list[str],
    hosts: int,
    per_host: int,
) -> None:
    batch = f"algorithm.batch_size={workers * 4}"
    settings = load_ppo(f"actor.backend=fsdp:d{workers}", batch, *overrides)
    plan = make_plan(settings, scheduler=scheduler)
    [group] = plan.groups
    assert (group.hosts, group.workers_per_host) == (hosts, per_host)
    assert plan.trainers.world_size == workers
    assert list(plan.models["actor"].ranks) == list(range(workers))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ([{"name": "rollout", "elastic": True}], "must include 'trainer'"),
        ([{}, {"name": "rollout"}], "all groups except 'trainer' must be elastic"),
        ([{}, {}], "have different names"),
    ],
)
def test_plan_needs_exactly_one_fixed_trainer_group(
    load_ppo: Load, changes: list[dict[str, Any]], problem: str
) -> None:
    """Every process of a run finds the trainers' world by this group."""
    plan = make_plan(load_ppo(), scheduler="local")
    groups = [plan.trainers.model_copy(update=change) for change in changes]
    wrong = plan.model_copy(update={"groups": tuple(groups)})
    with pytest.raises(ValueError, match=problem):
        Plan.from_json(wrong.to_json())
