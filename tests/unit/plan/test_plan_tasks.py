"""Generation in rollout tasks: groups, calls, and rejected settings."""

from __future__ import annotations

import re

import pytest

from slurmrl.config.schema import Config
from slurmrl.plan import build, plan_values
from slurmrl.plan.build import ROLLOUT_WORKER, STORED, make_plan
from slurmrl.plan.checks.fit import rejection_in_task
from slurmrl.plan.dataflow import Method
from slurmrl.plan.estimates.call_costs import memories
from slurmrl.plan.estimates.hardware import GIB
from slurmrl.plan.estimates.worker_memory import VERSIONS, WORKER, task_bytes, worker_bytes
from slurmrl.plan.model import Plan
from slurmrl.plan.placement import slurm_of
from slurmrl.plan.plan_document import document
from slurmrl.plan.plan_values import report
from slurmrl.scheduler.parse import HostRow
from tests.unit.plan.conftest import Load, memory_problems
from tests.unit.plan.test_plan_estimates import SEVEN_BILLION

SERVERS = (
    "rollout.tasks={max: 2}",
    "rollout.backend=sglang:t2",
    "rollout.python=/bin/sh",
    "actor.backend=fsdp:d16",
    "cluster.gpus_per_worker=1",
    "cluster.gpu_memory=80G",
    "dataset.max_prompt_tokens=1792",
    "actor.gradient_checkpointing=full",
    "critic.gradient_checkpointing=full",
)


@pytest.mark.parametrize(
    ("overrides", "tasks", "ranks"),
    [
        (("rollout.tasks={max: 3}",), 3, 1),
        (("rollout.tasks={}",), 1, 1),
        (("rollout.tasks={}", "rollout.backend=native:d2"), 2, 1),
        (("rollout.tasks={}", "rollout.backend=native:d2t2"), 2, 2),
        (("rollout.tasks={max: 3}", "rollout.backend=native:t2"), 3, 2),
    ],
)
def test_rollout_tasks_generate_and_trainers_read_samples(
    plan_ppo: Load, overrides: tuple[str, ...], tasks: int, ranks: int
) -> None:
    settings = plan_ppo(*overrides)
    found = make_plan(settings, scheduler="slurm")
    trainers, rollout = found.groups
    assert (rollout.elastic, rollout.hosts, rollout.workers_per_host) == (True, tasks, ranks)
    assert rollout.world_size == ranks
    assert rollout.worker == ROLLOUT_WORKER
    generate = found.calls[0]
    assert (generate.role, generate.method, generate.interface) == (None, Method.GENERATE, STORED)
    assert generate.ranks == found.models["actor"].ranks
    assert not any(call.pre_hooks for call in found.calls)
    assert found.models["rollout"].group == "rollout"
    assert settings.config.rollout.publish is not None
    assert trainers.world_size == found.models["actor"].ranks[-1] + 1
    assert Plan.from_json(found.to_json()) == found


def test_tasks_in_the_trainers_job_use_its_remaining_gpus(plan_ppo: Load) -> None:
    """The job requests GPUs for both, and there is no other job."""
    settings = plan_ppo(
        "cluster.gpus_per_worker=1", "actor.backend=fsdp:d12", "rollout.tasks={}",
        "rollout.gpus=12-15", "algorithm.batch_size=48",
    )  # fmt: skip
    found = make_plan(settings, scheduler="slurm")
    trainers, rollout = found.groups
    assert (trainers.hosts, trainers.workers_per_host, trainers.tasks_per_host) == (2, 6, 2)
    assert (trainers.world_size, trainers.slots_per_host, rollout.hosts) == (12, 8, 4)
    assert found.jobs == (trainers,)
    shown = report(settings, found)["groups"]
    assert [(group["gpus_per_host"], group["array"]) for group in shown] == [
        (8, "0-7%1"),
        (1, None),
    ]
    alone = make_plan(settings, scheduler="local").trainers
    assert (alone.hosts, alone.workers_per_host, alone.tasks_per_host) == (1, 12, 4)
    split = plan_ppo(
        "cluster.gpus_per_worker=1", "actor.backend=fsdp:d12", "rollout.tasks={}",
        "rollout.gpus=12-15", "algorithm.batch_size=48", "rollout.backend=native:d2t2",
    )  # fmt: skip
    trainers, rollout = make_plan(split, scheduler="slurm").groups
    assert (trainers.hosts, trainers.workers_per_host, trainers.tasks_per_host) == (2, 6, 1)
    assert (trainers.slots_per_host, rollout.hosts, rollout.workers_per_host) == (8, 2, 2)


def test_server_in_the_trainers_job_may_use_several_gpus(plan_ppo: Load) -> None:
    """The job requests host memory for workers or tasks, whichever need more."""
    settings = plan_ppo(
        *SERVERS, "rollout.tasks={}", "actor.backend=fsdp:d32", "rollout.gpus=32-63",
        "algorithm.batch_size=128", architecture=SEVEN_BILLION,
    )  # fmt: skip
    rows = [HostRow(f"n{number}", "idle", 8, 64, 2**20) for number in range(8)]
    plan = make_plan(settings, scheduler="slurm", hosts={"trainer": rows, "rollout": rows})
    trainers, rollout = plan.groups
    assert (trainers.hosts, trainers.workers_per_host, trainers.tasks_per_host) == (8, 4, 2)
    assert (trainers.slots_per_host, rollout.hosts, rollout.gpus_per_worker) == (8, 16, 2)
    worker, task = worker_bytes(settings), task_bytes(settings)
    assert worker is not None
    assert task is not None
    assert trainers.memory_bytes == -(-max(worker, task // 2) // GIB) * GIB
    assert worker < task // 2


def test_rollout_array_has_its_own_slurm_options(plan_ppo: Load) -> None:
    """Missing options come from the trainers, and an empty string unsets an option, even after a
    reload.
    """
    settings = plan_ppo(
        "cluster={gpus_per_worker: 1, slurm: {partition: main, qos: high, account: us, links: 3, "
        'nodelist: ""}}',
        "rollout.tasks={max: 2}",
        'rollout.slurm={partition: preemptible, qos: "", time: 30, gpu_type: a40, links: 5}',
    )
    slurm = slurm_of(settings.config, "rollout")
    assert (slurm.partition, slurm.qos, slurm.account) == ("preemptible", None, "us")
    assert slurm_of(settings.config, "trainer") == settings.config.cluster.slurm
    assert settings.config.cluster.slurm.nodelist is None
    assert slurm_of(Config.model_validate(settings.config.model_dump()), "rollout") == slurm
    rows = {"trainer": [HostRow("n0", "idle", 8, 64)] * 9, "rollout": [HostRow("n9", "idle", 1, 4)]}
    trainers, rollout = (plan := make_plan(settings, scheduler="slurm", hosts=rows)).groups
    assert (trainers.links, trainers.cpus_per_worker) == (3, 8)
    assert (rollout.links, rollout.cpus_per_worker) == (10, 4)
    assert build.lacking(plan, settings.config, rows) == []
    (line,) = build.lacking(plan, settings.config, {**rows, "rollout": []})
    assert "the rollout group needs 1 host with 1 GPU, but partition preemptible has 0" in line


def test_server_task_has_one_worker_with_all_gpus(plan_ppo: Load) -> None:
    """The job requests the cores of all GPUs, and host memory for two versions.

    The plan shows both.
    """
    settings = plan_ppo(*SERVERS, architecture=SEVEN_BILLION)
    rows = [HostRow(f"n{number}", "idle", 8, 64, 2**20) for number in range(4)]
    hosts = {"trainer": rows, "rollout": rows}
    plan = make_plan(settings, scheduler="slurm", hosts=hosts)
    group = plan.group("rollout")
    assert (group.hosts, group.workers_per_host, group.gpus_per_worker) == (2, 1, 2)
    assert group.cpus_per_worker == 2 * plan.trainers.cpus_per_worker
    weights = memories(settings)["rollout"].weights
    assert group.memory_bytes == pytest.approx(WORKER + VERSIONS * 2 * weights, rel=0.05)
    model = plan.models["rollout"]
    assert model.ranks == (0, 0, 1, 1)
    places = [(row.host, row.gpu) for row in plan_values.rows(plan, model)]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    found = report(settings, plan)
    assert found["memory"]["server_bytes"] == 77 * GIB
    assert document(found)


def test_server_larger_than_the_gpus_of_its_task_is_rejected(plan_ppo: Load) -> None:
    """The check runs at submission if the GPU's size is known, else in the task's worker."""
    small = (*SERVERS, "rollout.backend=vllm:d2")
    known = plan_ppo(*small, "cluster.gpu_memory=16G", architecture=SEVEN_BILLION)
    said = {problem.key: problem.message for problem in memory_problems(known)}
    assert re.search(r"a server needs .* of weights.*gets 13\.0 GiB", said["rollout.backend"])
    unknown = plan_ppo(*small, "cluster.gpu_memory=", architecture=SEVEN_BILLION)
    assert rejection_in_task(unknown, "GPU of 80", 80 * GIB) is None
    assert "a server needs" in (rejection_in_task(unknown, "GPU of 16", 16 * GIB) or "")
