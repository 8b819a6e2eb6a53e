"""Generation in tasks of their own: groups, calls, and what is refused."""

from __future__ import annotations

import pytest

from slurmrl.config.schema import Config
from slurmrl.graph.call import Method
from slurmrl.plan.build import ROLLOUT_WORKER, STORED, make_plan
from slurmrl.plan.checks import inventory
from slurmrl.plan.model import Plan
from slurmrl.plan.placement import slurm_of
from slurmrl.scheduler.parse import HostRow
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


def test_the_array_has_options_of_its_own(plan_ppo: Load) -> None:
    """What is left out is that of the trainers, and an empty text is nothing; the same once the
    resolved configuration is read again. The hosts are those of its own partition."""
    settings = plan_ppo(
        "cluster={gpus_per_worker: 1, slurm: {partition: main, qos: high, account: us, links: 3}}",
        "rollout.tasks={max: 2}",
        'rollout.slurm={partition: preemptible, qos: "", time: 30, gpu_type: a40, links: 5}',
    )
    slurm = slurm_of(settings.config, "rollout")
    assert (slurm.partition, slurm.qos, slurm.account) == ("preemptible", None, "us")
    assert slurm_of(settings.config, "trainer") == settings.config.cluster.slurm
    assert slurm_of(Config.model_validate(settings.config.model_dump()), "rollout") == slurm
    rows = {"trainer": [HostRow("n0", "idle", 8, 64)] * 9, "rollout": [HostRow("n9", "idle", 1, 4)]}
    trainers, rollout = (plan := make_plan(settings, scheduler="slurm", hosts=rows)).groups
    assert (trainers.links, trainers.cpus_per_worker) == (3, 8)
    assert (rollout.links, rollout.cpus_per_worker) == (10, 4)
    assert inventory.lacking(plan, settings.config, rows) == []
    (line,) = inventory.lacking(plan, settings.config, {**rows, "rollout": []})
    assert "the rollout group needs 1 hosts with 1 GPUs, partition preemptible has 0" in line
