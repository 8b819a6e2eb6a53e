"""The job of ``profile-cluster``: hosts, ranks, GPUs and invalid options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slurmrl.config.schema import Cluster, Slurm
from slurmrl.desk import measured_profile
from slurmrl.desk.measured_profile import Profiling, _group, _name, _seen, profile
from slurmrl.errors import UsageError
from slurmrl.plan.estimates import hardware
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.parse import HostRow

WHAT = Profiling(None, (), Path("r"), Path("r"), None, None, None, None, None, 1.0)
ROWS = [
    HostRow("a", "idle", 4),
    HostRow("b", "mixed*", 8),
    HostRow("c", "allocated", 8),
    HostRow("d", "down*", 16),
    HostRow("e", "idle", 0),
]


@pytest.fixture(autouse=True)
def _hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMRL_PROFILE", "none")
    monkeypatch.setattr(SlurmClient, "hosts", lambda self, partition: ROWS)


def shape(cluster: Cluster, kind: str = "slurm", **options: int) -> tuple[int, int, int]:
    group = _group(replace(WHAT, **options), cluster, kind)  # type: ignore[arg-type]
    return group.hosts, group.workers_per_host, group.gpus_per_worker


def test_job_has_all_gpus_of_two_usable_hosts() -> None:
    assert shape(Cluster()) == (2, 8, 1)
    assert shape(Cluster(), ranks=4) == (2, 4, 1)
    assert shape(Cluster(), ranks=16) == (1, 16, 1), "no usable host has 16 GPUs"
    assert shape(Cluster(workers_per_host=4)) == (2, 4, 1)
    assert shape(Cluster(gpus_per_worker=0)) == (2, 2, 0)
    assert shape(Cluster(), hosts=3, ranks=8) == (3, 8, 1)
    assert shape(Cluster(gpus_per_worker=0), "local") == (1, 2, 0)


def test_job_without_collectives_is_rejected() -> None:
    with pytest.raises(UsageError, match="at least two ranks"):
        shape(Cluster(gpus_per_worker=0), "local", ranks=1)
    with pytest.raises(UsageError, match="local scheduler has one host"):
        shape(Cluster(gpus_per_worker=0), "local", hosts=2)


def test_hardware_name_comes_from_the_option_or_the_gpu() -> None:
    assert _name(Cluster(), 0) == "cpu"
    assert _name(Cluster(slurm=Slurm(gpu_type="nvidia_a100")), 1) == "a100"
    assert _name(Cluster(), 1) is None
    seen = [[{"what": "device", "name": "NVIDIA H200", "bytes": 1}]]
    assert _seen(seen) == "h200"
    assert _seen([[{**seen[0][0], "name": "AMD Instinct MI300X"}]]) == "mi300x"


@pytest.mark.parametrize("gpu_type", ["rtx4090", "rtx_4090", "nvidia_rtx_a6000", "mi300x", "titan"])
def test_plan_finds_the_profile_of_an_unknown_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_type: str
) -> None:
    monkeypatch.delenv("SLURMRL_PROFILE")
    monkeypatch.setattr(hardware, "own_folder", lambda: tmp_path)
    cluster = Cluster(slurm=Slurm(gpu_type=gpu_type))
    name = _name(cluster, 1)
    assert name is not None
    (tmp_path / f"{name}.yaml").write_text(f"hardware: {name}\n")
    assert hardware.name_of(cluster) == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": Path("/")}, "is a directory"),
        ({"output": Path("/none/there/a.yaml")}, "there is no folder"),
        ({"name": "My GPU"}, "lower-case"),
    ],
)
def test_wrong_options_are_rejected_before_the_job(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    what = replace(WHAT, scheduler="local", root=tmp_path / "r", **options)  # type: ignore[arg-type]
    said: list[str] = []
    with pytest.raises(UsageError, match=message):
        profile(what, said.append)
    assert said == []


@pytest.mark.parametrize(("kind", "name"), [("local", "laptop"), ("slurm", "cpu")])
def test_name_of_other_hardware_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    monkeypatch.setattr(measured_profile, "gpus_per_worker", lambda cluster, kind: kind == "slurm")
    what = replace(WHAT, scheduler=kind, root=tmp_path / "r", name=name)
    with pytest.raises(UsageError, match=f"--name {name}: the ranks have "):
        profile(what, lambda text: None)
