"""Precision, cores and host memory where the configuration does not set them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

from slurmrl.plan import build, inherited_settings
from slurmrl.plan.build import make_plan
from slurmrl.plan.estimates.worker_memory import WORKER, worker_bytes
from slurmrl.plan.model import GroupPlan
from slurmrl.plan.plan_values import report
from slurmrl.plan.settings import Settings
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.parse import HostRow
from tests.unit.plan.conftest import Load
from tests.unit.plan.test_plan_estimates import SEVEN_BILLION

GIB = 2**30
LARGE_HOST = HostRow("large", "idle", 8, 128, 2_000_000)
SMALL_HOST = HostRow("small", "idle", 4, 8, 16_000)
UNKNOWN_HOST = HostRow("unknown", "idle", 8)


def group_of(settings: Settings, hosts: Sequence[HostRow] | None = None) -> GroupPlan:
    return make_plan(settings, scheduler="slurm", hosts={"trainer": hosts or ()}).groups[0]


@pytest.mark.parametrize(
    ("scheduler", "device", "override", "dtype", "gpus"),
    [
        ("slurm", False, "seed=1", "bfloat16", 1),
        ("slurm", False, "cluster.gpus_per_worker=0", "float32", 0),
        ("slurm", False, "actor.dtype=float32", "float32", 1),
        ("local", False, "seed=1", "float32", 0),
        ("local", False, "cluster.gpus_per_worker=1", "bfloat16", 1),
        ("local", True, "seed=1", "bfloat16", 1),
        ("local", True, "cluster.gpus_per_worker=0", "float32", 0),
        ("local", False, "actor.dtype=bfloat16", "bfloat16", 0),
    ],
)
def test_default_precision_is_bfloat16_on_expected_gpus_and_float32_on_cpus(
    plan_ppo: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheduler: str,
    device: bool,
    override: str,
    dtype: str,
    gpus: int,
) -> None:
    """All roles have this precision unless the configuration sets another one."""
    path = tmp_path / "nvidia0"
    if device:
        path.touch()
    monkeypatch.setattr(inherited_settings, "FIRST_GPU", path)
    settings = plan_ppo(override, f"cluster.scheduler={scheduler}")
    config = settings.config
    assert make_plan(settings, scheduler=scheduler).groups[0].gpus_per_worker == gpus
    assert config.critic is not None
    assert config.ref is not None
    assert {config.actor.dtype, config.critic.dtype, config.ref.dtype} == {dtype}


def test_plan_gives_precision_and_reason(plan_ppo: Load) -> None:
    """Each role's precision comes with the key that sets it, or as a default."""
    on_slurm = "cluster.scheduler=slurm"
    for overrides, expected in [
        ((), ["default on GPUs"] * 3),
        (("cluster.gpus_per_worker=0",), ["default on CPUs"] * 3),
        (("actor.dtype=bfloat16",), ["actor.dtype"] * 3),
        (("critic.dtype=float32",), ["default on GPUs", "critic.dtype", "default on GPUs"]),
    ]:
        settings = plan_ppo(on_slurm, *overrides)
        shown = report(settings, make_plan(settings, scheduler="slurm"))
        assert [
            shown["models"][role]["dtype_from"] for role in ("actor", "critic", "ref")
        ] == expected


@pytest.mark.parametrize(
    ("hosts", "overrides", "cpus"),
    [
        (None, (), 8),
        ([LARGE_HOST], (), 8),
        ([UNKNOWN_HOST], (), 8),
        ([SMALL_HOST], (), 2),
        ([SMALL_HOST, LARGE_HOST], (), 8),
        ([SMALL_HOST], ("cluster.threads_per_worker=3",), 3),
        ([SMALL_HOST], ("cluster.cpus_per_worker=4",), 4),
        (None, ("cluster.cpus_per_worker=1",), 1),
        (None, ("cluster.gpus_per_worker=0", "cluster.threads_per_worker=3"), 3),
        (None, ("cluster.gpus_per_worker=0", "cluster.cpus_per_worker=5"), 5),
    ],
)
def test_each_gpu_gets_eight_cores_or_its_share_of_a_small_host(
    plan_ppo: Load, hosts: list[HostRow] | None, overrides: tuple[str, ...], cpus: int
) -> None:
    settings = plan_ppo("cluster.gpus_per_worker=1", *overrides)
    assert group_of(settings, hosts).cpus_per_worker == cpus


@pytest.mark.parametrize(
    ("hosts", "overrides", "memory"),
    [
        (None, (), "9G"),
        ([LARGE_HOST], (), "9G"),
        ([UNKNOWN_HOST], (), None),
        ([SMALL_HOST], (), "7200M"),
        ([SMALL_HOST], ("cluster.mem_per_worker=1G",), "1G"),
        (None, ("cluster.slurm.extra_lines=['--mem=0']",), None),
        (None, ("cluster.slurm.extra_lines=['#SBATCH --mem-per-gpu 4G']",), None),
        (None, ("cluster.slurm.extra_lines=['--exclusive']",), "9G"),
        (None, ("cluster.gpus_per_worker=0",), None),
    ],
)
def test_host_memory_request_is_the_estimate_up_to_the_host_size(
    plan_ppo: Load, hosts: list[HostRow] | None, overrides: tuple[str, ...], memory: str | None
) -> None:
    """slurmrl requests nothing if Slurm does not know the memory of its hosts, or if the user
    requests memory.
    """
    settings = plan_ppo("cluster.gpus_per_worker=1", *overrides)
    assert group_of(settings, hosts).mem_per_worker == memory


def test_host_memory_includes_checkpoint_copies_if_asynchronous(plan_ppo: Load) -> None:
    """The copies contain weights and both moments of the trained roles in float32 (10.6 GiB per
    rank for 7.6 billion parameters on eight ranks). Offloading needs additional memory.
    """
    shape = ("cluster.gpus_per_worker=1", "actor.backend=fsdp:d8")
    settings = plan_ppo(*shape, architecture=SEVEN_BILLION)
    found = worker_bytes(settings)
    assert found is not None
    assert (found - WORKER) / GIB == pytest.approx(10.64 + 9.88, rel=0.01)  # the critic has no head
    assert group_of(settings).mem_per_worker == "29G"
    blocking = "checkpoint.asynchronous=false"
    assert worker_bytes(plan_ppo(*shape, blocking, architecture=SEVEN_BILLION)) == WORKER


def test_weight_versions_need_host_memory_for_two_copies(plan_ppo: Load) -> None:
    """A copy of 7.6 billion parameters in bfloat16 takes 1.77 GiB on each of eight ranks.

    Whole versions need no copy of the one before.
    """
    shape = ("cluster.gpus_per_worker=1", "actor.backend=fsdp:d8", "checkpoint.asynchronous=false")
    dtype = "actor.dtype=bfloat16"
    found = [
        worker_bytes(plan_ppo(*shape, dtype, f"rollout.publish={each}", architecture=SEVEN_BILLION))
        for each in ("{}", "{whole_every: 1}")
    ]
    sizes = [((each or 0) - WORKER) / GIB for each in found]
    assert sizes == pytest.approx([2 * 1.77, 1.77], rel=0.01)


@pytest.mark.parametrize(
    ("torch_release", "container", "factor"),
    [("2.13.0+cu130", False, 1), ("2.13.0", True, 2), ("2.12.1", False, 2)],
)
def test_offloaded_models_count_with_pinned_allocation_sizes(
    plan_ppo: Load,
    monkeypatch: pytest.MonkeyPatch,
    torch_release: str,
    container: bool,
    factor: int,
) -> None:
    """Offloaded are weights, gradients and both moments. Before torch 2.13, page-locked weights and
    gradients take up to twice their size. A container may have such a release.
    """
    monkeypatch.setattr(metadata, "version", lambda name: torch_release)
    settings = plan_ppo(
        *("cluster.gpus_per_worker=1", "actor.backend=fsdp:d8"),
        *("checkpoint.asynchronous=false", "actor.cpu_offload=true"),
        *(["cluster.slurm.container=apptainer exec image.sif"] if container else []),
        architecture=SEVEN_BILLION,
    )
    found = worker_bytes(settings)
    assert found is not None
    assert (found - WORKER) / GIB == pytest.approx(10.64 / 3 * (2 * factor + 2), rel=0.01)


def test_offloaded_actor_average_has_float32_weights(plan_ppo: Load) -> None:
    fixed = ("cluster.gpus_per_worker=1", "checkpoint.asynchronous=false", "actor.dtype=bfloat16")
    plain, average = (
        worker_bytes(plan_ppo(*fixed, "ref.cpu_offload=true", *more))
        for more in ((), ("ref.ema=0.5",))
    )
    assert ((average or 0) - WORKER) == 2 * ((plain or 0) - WORKER) > 0


def test_requests_beyond_any_host_are_rejected(plan_ppo: Load) -> None:
    """The message has the requested number, the number of the hosts, and the key to change."""
    for key, value, expected in [
        (
            "cpus_per_worker",
            "9",
            "requests 18 cores on each of 1 hosts, but the cluster has hosts with",
        ),
        ("mem_per_worker", "8G", "requests 16384 MiB of memory on each of 1 hosts"),
    ]:
        settings = plan_ppo("cluster.gpus_per_worker=1", f"cluster.{key}={value}")
        plan = make_plan(settings, scheduler="slurm", hosts={"trainer": [SMALL_HOST]})
        (line,) = build.lacking(plan, settings.config, {"trainer": [SMALL_HOST]})
        assert expected in line
        assert f"lower cluster.{key}" in line
        for enough in ([SMALL_HOST, LARGE_HOST], [UNKNOWN_HOST]):
            assert build.lacking(plan, settings.config, {"trainer": enough}) == []


def test_lowered_defaults_are_reported(plan_ppo: Load) -> None:
    """The plan warns where hosts have fewer cores or less memory than a default would request."""
    settings = plan_ppo("cluster.gpus_per_worker=1")
    for hosts, words in [([SMALL_HOST], ["2 cores for each GPU", "7.0 GiB"]), ([LARGE_HOST], [])]:
        plan = make_plan(settings, scheduler="slurm", hosts={"trainer": hosts})
        lines = build.scarce(plan, settings, {"trainer": hosts})
        assert len(lines) == len(words)
        for line, word in zip(lines, words, strict=True):
            assert word in line


def test_workers_per_host_above_the_world_size_is_lowered(plan_ppo: Load) -> None:
    """Two trainers on hosts with 8 GPUs leave the other GPUs free."""
    settings = plan_ppo("cluster.workers_per_host=8")
    (trainers,) = make_plan(settings, scheduler="slurm").jobs
    assert (trainers.hosts, trainers.workers_per_host) == (1, 2)


@pytest.mark.parametrize(
    ("partition", "hosts", "expected"),
    [
        ("gpuu", [], "Slurm has no partition 'gpuu': did you mean 'gpu'? allowed: cpu, gpu"),
        ("gpu,cpuu", [LARGE_HOST], "Slurm has no partition 'cpuu': did you mean 'cpu'? "),
        ("gpu,cpu", [LARGE_HOST], ""),
        ("gpu", [LARGE_HOST], ""),
    ],
)
def test_unknown_partition_is_reported_with_existing_partitions(
    plan_ppo: Load,
    monkeypatch: pytest.MonkeyPatch,
    partition: str,
    hosts: list[HostRow],
    expected: str,
) -> None:
    """For an unknown partition, sinfo lists no hosts and reports no error."""
    monkeypatch.setattr(SlurmClient, "partition_names", lambda client: ["cpu", "gpu"])
    settings = plan_ppo(f"cluster.slurm.partition={partition}")
    plan = make_plan(settings, scheduler="slurm")
    found = build.lacking(plan, settings.config, {"trainer": hosts})
    assert len(found) == bool(expected)
    assert "".join(found).startswith(expected)
