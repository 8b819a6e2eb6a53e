"""Generation in tasks of their own: groups, calls, and what is refused."""

from __future__ import annotations

import pytest

from slurmrl.graph.call import Method
from slurmrl.plan.build import ROLLOUT_WORKER, STORED, make_plan
from slurmrl.plan.model import Plan
from tests.unit.plan.conftest import Load


@pytest.mark.parametrize(
    ("overrides", "tasks"),
    [
        (("rollout.tasks={max: 3}",), 3),
        (("rollout.tasks={}",), 1),
        (("rollout.tasks={}", "rollout.backend=native:d2"), 2),
    ],
)
def test_tasks_generate_and_the_trainers_read(
    plan_ppo: Load, overrides: tuple[str, ...], tasks: int
) -> None:
    settings = plan_ppo(*overrides)
    found = make_plan(settings, scheduler="slurm")
    trainers, rollout = found.groups
    assert (rollout.elastic, rollout.hosts, rollout.workers_per_host) == (True, tasks, 1)
    assert rollout.worker == ROLLOUT_WORKER
    generate = found.calls[0]
    assert (generate.role, generate.method, generate.interface) == (None, Method.GENERATE, STORED)
    assert generate.ranks == found.models["actor"].ranks
    assert not any(call.pre_hooks for call in found.calls)
    assert found.models["rollout"].group == "rollout"
    assert settings.config.rollout.publish is not None
    assert trainers.world_size == found.models["actor"].ranks[-1] + 1
    assert Plan.from_json(found.to_json()) == found
