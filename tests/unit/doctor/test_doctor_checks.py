from __future__ import annotations

import errno
import os
import resource
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurmrl.desk.doctor import Check, State, directory, failed, guarded, machine, ok
from slurmrl.desk.provenance import TorchBuild
from slurmrl.errors import EnvironmentFailure, SchedulerError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import SystemCalls
from slurmrl.scheduler.client import SlurmClient
from slurmrl.tensors.ops.native.libraries import Half, stem
from slurmrl.tensors.parallel import gpu


def states(checks: list[Check]) -> dict[str, State]:
    return {one.name: one.state for one in checks}


def test_environment_failure_becomes_a_failed_check() -> None:
    def look() -> Check:
        raise EnvironmentFailure("no such place")

    assert guarded("root", "choose another", look) == [
        failed("root", "no such place", "choose another")
    ]
    assert guarded("root", "", lambda: ok("root", "there")) == [ok("root", "there")]


@pytest.mark.parametrize(
    ("files", "state"),
    [(1024, State.WARNING), (65536, State.OK), (resource.RLIM_INFINITY, State.OK)],
)
def test_open_file_limits_are_checked(files: int, state: State) -> None:
    found = machine.process_limits(
        lambda kind: (files, files) if kind == resource.RLIMIT_NOFILE else (9, 9)
    )
    assert states(found) == {"open files": state, "processes": State.WARNING}
    assert "ulimit -u" in found[1].advice


def statvfs(monkeypatch: pytest.MonkeyPatch, **values: int) -> None:
    usual = {"f_frsize": 4096, "f_blocks": 2**30, "f_bavail": 2**29, "f_files": 10**7}
    found = SimpleNamespace(**{**usual, "f_favail": 10**6, **values})
    monkeypatch.setattr(os, "statvfs", lambda folder: found)


@pytest.mark.parametrize(
    ("blocks", "state"), [(2**29, State.OK), (2**20, State.WARNING), (2**10, State.FAILED)]
)
def test_disk_space_is_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, blocks: int, state: State
) -> None:
    statvfs(monkeypatch, f_bavail=blocks)
    found = directory.space(tmp_path)
    assert (found.state, found.values["free_bytes"]) == (state, blocks * 4096)


def test_free_inodes_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert directory.inodes(tmp_path).state in State
    statvfs(monkeypatch, f_favail=17)
    assert directory.inodes(tmp_path).state is State.WARNING
    statvfs(monkeypatch, f_files=0, f_favail=0)
    assert directory.inodes(tmp_path).state is State.OK


QUOTA = """\
Disk quotas for user ada (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
srv:/home  9900000* 9000000 10000000 1700000000 12345       0       0       0
"""
LFS_QUOTA = "/lustre  1048576  0  2097152  -  90  0  100  -  \n"


def test_quotas_of_both_tools_are_read() -> None:
    (home,) = directory.parse_quota(QUOTA)
    assert (home.filesystem, home.used_kib, home.limit_kib) == ("srv:/home", 9900000, 9000000)
    assert home.used > 1
    (lustre,) = directory.parse_quota(LFS_QUOTA)
    assert (lustre.used, lustre.files_limit) == (0.9, 100)
    assert str(lustre) == "/lustre: 1.0 GiB of 2.0 GiB, 90 of 100 files"
    assert directory.parse_quota("Disk quotas for user root (uid 0): none\n") == []


@pytest.mark.parametrize(("text", "state"), [(QUOTA, State.WARNING), ("", State.OK)])
def test_a_full_quota_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, state: State
) -> None:
    (tmp_path / "answer").write_text(text)
    (tmp_path / "quota").write_text(
        f'#!/bin/sh\nread x < "{tmp_path}/answer"; cat "{tmp_path}/answer"\n'
    )
    (tmp_path / "quota").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = directory.quota(tmp_path)
    assert found.state is state


def test_directory_check_passes_for_a_working_private_directory(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    atomic.make_private_directory(folder)
    assert directory.owner(folder).state in (State.OK, State.WARNING)
    found = directory.latency(folder)
    assert set(found.values) == {"create_fsync_s", "read_s", "link_s", "rename_s", "longest_s"}
    assert found.values["longest_s"] >= found.values["create_fsync_s"] > 0
    assert list(folder.iterdir()) == []
    folder.chmod(0o777)
    with pytest.raises(EnvironmentFailure, match="mode 0777"):
        directory.owner(folder)


def test_file_system_that_changes_file_modes_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    atomic.make_private_directory(folder)

    def careless(path: Path, data: bytes, durable: bool, calls: SystemCalls) -> None:
        path.write_bytes(data)
        path.chmod(stat.S_IRUSR | stat.S_IROTH)

    monkeypatch.setattr(directory, "write_new", careless)
    found = directory.owner(folder)
    assert (found.state, "0404" in found.measured) == (State.FAILED, True)


def test_file_system_without_hard_links_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoLinks(SystemCalls):
        def link(self, source: Path, target: Path) -> None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(directory, "REAL", NoLinks())
    with pytest.raises(EnvironmentFailure, match="link failed: Operation not supported"):
        directory.latency(tmp_path)


def test_a_slow_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "SLOW_S", 0.0)
    assert directory.latency(tmp_path).state is State.WARNING


UUIDS = ["GPU-11111111-aaaa", "GPU-22222222-bbbb"]


@pytest.mark.parametrize(
    ("expected", "visible", "seen", "state"),
    [
        (0, "", None, State.OK),
        (0, "NoDevFiles", [], State.OK),
        (2, "0,1", None, State.OK),
        (2, "0,1", UUIDS, State.OK),
        (1, "GPU-2222", UUIDS[1:], State.OK),
        (1, "GPU-2222", UUIDS, State.WARNING),
        (2, "0", UUIDS, State.FAILED),
        (1, "3", UUIDS, State.FAILED),
        (1, "GPU-3333", UUIDS, State.FAILED),
        (1, "0", [], State.FAILED),
    ],
)
def test_gpu_count_is_checked(
    expected: int, visible: str, seen: list[str] | None, state: State
) -> None:
    assert machine.granted_gpus(expected, visible, seen).state is state


def test_output_of_nvidia_smi_is_read() -> None:
    text = (
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-11111111-aaaa)\n"
        "  MIG 1g.10gb     Device  0: (UUID: MIG-9)\n"
        "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-22222222-bbbb)\n"
    )
    assert machine.listed_gpus(text) == UUIDS


def install(monkeypatch: pytest.MonkeyPatch, build: TorchBuild, driver: str | None) -> None:
    monkeypatch.setattr(machine, "torch_build", lambda: build)
    monkeypatch.setattr(machine, "driver_version", lambda: driver)


CPU_BUILD = TorchBuild("2.13.0+cpu", None, gpus=False)


def test_cpu_build_of_torch_fails_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, CPU_BUILD, "580.65.06")
    assert states(machine.packages(gpus=True))["torch on gpus"] is State.FAILED
    assert states(machine.packages(gpus=False)) == {"packages": State.OK}
    monkeypatch.setattr(machine, "version_of", lambda name: None)
    (found,) = machine.packages(gpus=False)
    assert (found.state, found.advice.startswith("pip install torch")) == (State.FAILED, True)


@pytest.mark.parametrize(
    ("cuda", "driver", "state", "advice"),
    [
        ("13.0", "580.65.06", State.OK, ""),
        ("12.9", "580.65.06", State.OK, ""),
        ("12.9", "535.54.03", State.OK, ""),
        ("13.0", "575.57.08", State.FAILED, "--torch cu126, or a driver of branch 580 or newer"),
        ("12.9", "470.82.01", State.FAILED, "a driver of branch 525 or newer"),
        ("13.0", None, State.OK, ""),
        ("14.1", "580.65.06", State.FAILED, "--torch cu130"),
    ],
)
def test_torch_too_new_for_the_driver_fails_with_a_suitable_build(
    monkeypatch: pytest.MonkeyPatch, cuda: str, driver: str | None, state: State, advice: str
) -> None:
    install(monkeypatch, TorchBuild("2.13.0", cuda, gpus=True), driver)
    found = machine.torch_on_gpus()
    assert (found.state, advice in found.advice) == (state, True), found
    assert cuda in found.measured


def test_build_advised_for_a_cpu_torch_fits_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, CPU_BUILD, "535.54.03")
    assert "--torch cu126" in machine.torch_on_gpus().advice


def test_driver_version_is_read_from_the_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "DRIVER_FILE", tmp_path / "version")
    assert machine.driver(gpus=False).state is State.OK
    assert machine.driver(gpus=True).state is State.FAILED
    for text in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.54.03  Release Build\n",
    ):
        (tmp_path / "version").write_text(text)
        found = machine.driver(gpus=True)
        assert found.state is State.OK
        assert found.measured == "NVIDIA 535.54.03, serves builds for CUDA 12 and older"


def test_hosts_with_other_software_are_named() -> None:
    login = [ok("python", "3.11.7"), ok("packages", "torch 2")]
    same = [ok("python", "3.11.7").at("n0"), ok("packages", "torch 2").at("n0")]
    assert machine.same_everywhere(login, same) == []
    (found,) = machine.same_everywhere(login, [*same, ok("python", "3.12.1").at("n1")])
    assert (found.state, found.measured) == (State.WARNING, "n1: python 3.12.1")


def test_command_missing_in_jobs_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(*arguments: object) -> None:
        raise SchedulerError("sbatch is not on PATH")

    monkeypatch.setattr(SlurmClient, "ping", lambda self: None)
    monkeypatch.setattr(SlurmClient, "try_out", reject)
    found = machine.slurm_in_jobs(tmp_path / "script.sh")
    assert states(found) == {"scontrol in jobs": State.OK, "sbatch in jobs": State.WARNING}
    assert "slurmrl resume" in found[1].advice


def test_doctor_reports_operators_that_a_job_would_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "ops"
    atomic.make_private_directory(folder)
    variables = {"SLURMRL_OPS_CACHE": str(folder)}
    command = f"SLURMRL_OPS_CACHE={folder} python -m slurmrl.tensors.ops.native"
    assert command in machine.operators(variables).measured
    (folder / f"{stem(Half.CPU)}-0123456789abcdef.so").touch()
    assert machine.operators(variables).measured == f"in {folder}"
    monkeypatch.setenv("SLURMRL_OPS_CACHE", str(folder))  # of a shell; jobs do not inherit it
    other = machine.operators({"XDG_CACHE_HOME": str(tmp_path)})
    assert f"none in {tmp_path}/slurmrl/ops:" in other.measured
