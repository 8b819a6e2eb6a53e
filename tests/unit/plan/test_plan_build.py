from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmrl.plan.build import make_plan
from slurmrl.plan.model import Plan
from slurmrl.plan.resolve import inherited_settings
from slurmrl.plan.settings import Settings

Load = Callable[..., Settings]


def test_the_plan_of_ppo_says_which_call_runs_where(load_ppo: Load) -> None:
    plan = make_plan(load_ppo("cluster.gpus_per_worker=0"), scheduler="local")
    assert plan.trainers.world_size == 2
    [group] = plan.groups
    assert (group.name, group.hosts, group.workers_per_host, group.links) == ("trainer", 1, 2, 8)
    assert plan.group("trainer") is group
    assert {role: (m.engine, m.ranks, m.trained, m.head) for role, m in plan.models.items()} == {
        "actor": ("fsdp", (0, 1), True, "lm"),
        "critic": ("fsdp", (0, 1), True, "value"),
        "ref": ("fsdp", (0, 1), False, "lm"),
    }
    assert [(call.name, call.role, call.method.value, call.ranks) for call in plan.calls] == [
        ("actor_gen", "actor", "generate", (0, 1)),
        ("reward_inf", None, "inference", (0, 1)),
        ("ref_inf", "ref", "inference", (0, 1)),
        ("critic_inf", "critic", "inference", (0, 1)),
        ("actor_train", "actor", "train_step", (0, 1)),
        ("critic_train", "critic", "train_step", (0, 1)),
    ]
    assert [call.name for call in plan.evaluation_calls] == ["actor_gen", "reward_inf"]


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
def test_workers_fill_their_hosts(
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
    ("scheduler", "device", "override", "gpus"),
    [
        ("local", False, "seed=1", 0),
        ("local", True, "seed=1", 1),
        ("local", True, "cluster.gpus_per_worker=0", 0),
        ("slurm", False, "seed=1", 1),
        ("slurm", False, "cluster.gpus_per_worker=0", 0),
    ],
)
def test_gpus_are_planned_where_they_are_to_be_expected(
    load_ppo: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheduler: str,
    device: bool,
    override: str,
    gpus: int,
) -> None:
    path = tmp_path / "nvidia0"
    if device:
        path.touch()
    monkeypatch.setattr(inherited_settings, "FIRST_GPU", path)
    plan = make_plan(load_ppo(override), scheduler=scheduler)
    assert plan.groups[0].gpus_per_worker == gpus


def test_processors_follow_the_threads_unless_given(load_ppo: Load) -> None:
    """Without GPUs a worker gets as many cores as it has threads, and no memory is requested."""
    on_cpus = "cluster.gpus_per_worker=0"
    settings = load_ppo(on_cpus, "cluster.threads_per_worker=3")
    group = make_plan(settings, scheduler="slurm").groups[0]
    assert (group.threads_per_worker, group.cpus_per_worker) == (3, 3)
    assert group.mem_per_worker is None
    group = make_plan(load_ppo(on_cpus, "cluster.cpus_per_worker=5"), scheduler="slurm").groups[0]
    assert (group.threads_per_worker, group.cpus_per_worker) == (1, 5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ([{"name": "rollout", "elastic": True}], "one of them must be 'trainer'"),
        ([{}, {"name": "rollout"}], "all groups but 'trainer' must be elastic"),
        ([{}, {}], "none twice"),
    ],
)
def test_the_trainers_are_the_one_fixed_group(
    load_ppo: Load, changes: list[dict[str, Any]], problem: str
) -> None:
    """Every process of a run finds the trainers' world by this."""
    plan = make_plan(load_ppo(), scheduler="local")
    groups = [plan.trainers.model_copy(update=change) for change in changes]
    wrong = plan.model_copy(update={"groups": tuple(groups)})
    with pytest.raises(ValueError, match=problem):
        Plan.from_json(wrong.to_json())
