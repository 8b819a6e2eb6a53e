from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from slurmrl.cli.main import main
from slurmrl.config.schema import Cluster
from slurmrl.desk import trial_jobs
from slurmrl.desk.doctor import Check, State
from slurmrl.desk.doctor import examine as examine_module
from slurmrl.desk.doctor import job as job_module
from slurmrl.desk.doctor.examine import Examination, examine
from slurmrl.desk.trial_checks import Code
from slurmrl.errors import SchedulerError
from slurmrl.plan.build import make_plan
from slurmrl.scheduler.base import JobState, SubmissionRequest
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.parse import HostRow
from tests.fake_runs import ADDITION, FakeScheduler, task, write_config


def look(root: Path, said: list[str] | None = None, **more: Any) -> dict[str, Check]:
    """Return the checks by name. Of several checks with one name, return the worst."""
    values: dict[str, Any] = {
        "config": None,
        "overrides": (),
        "root": root,
        "fallback": root,
        "scheduler": "local",
        "job": False,
        "timeout_s": 60.0,
        **more,
    }
    checks = examine(Examination(**values), (said if said is not None else []).append)
    order = list(State)
    return {one.name: one for one in sorted(checks, key=lambda one: order.index(one.state))}


def test_job_on_the_local_scheduler_leaves_no_files(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    found = look(root, job=True)
    assert [one for one in found.values() if one.state is State.FAILED] == []
    assert {"same directory", "gpus", "interface", "other hosts", "temporary space"} <= set(found)
    assert not root.exists()


def test_runs_in_the_root_are_kept(tmp_path: Path) -> None:
    from slurmrl.env import user_name

    mine = tmp_path / user_name() / "experiment" / "1"
    mine.mkdir(parents=True)
    look(tmp_path)
    assert list((tmp_path / user_name()).iterdir()) == [mine.parent]


def test_root_that_cannot_be_created_is_one_failed_check(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = look(tmp_path / "file" / "runs")
    assert [one.name for one in found.values() if one.state is State.FAILED] == ["root"]
    assert "open files" in found


def test_site_profile_is_used_without_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("SLURMRL_PROFILE")
    assert "site profile" not in look(tmp_path / "r")
    path = tmp_path / "slurmrl/lab.yaml"
    path.parent.mkdir()
    path.write_text("cluster: {scheduler: local, slurm: {partition: gpu}}\n")
    path.chmod(0o600)
    assert examine_module.check_site_profile()[0].slurm.partition == "gpu"
    found = look(tmp_path / "r", scheduler=None)
    assert (found["site profile"].state, found["scheduler"].state) == (State.OK, State.OK)
    path.write_text("cluster: {slurm: {partitoin: gpu}}\n")
    wrong = look(tmp_path / "r")["site profile"]
    assert (wrong.state, f"{path}:1" in wrong.measured) == (State.FAILED, True)


def test_configuration_problems_are_failed_checks(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    assert look(tmp_path / "r", config=path)["configuration"].state is State.OK
    wrong = look(tmp_path / "r", config=path, overrides=("sed=3",))["configuration"]
    assert (wrong.state, "sed" in wrong.measured) == (State.FAILED, True)
    (tmp_path / "data.jsonl").unlink()
    missing = look(tmp_path / "r", config=path)["configuration"]
    assert (missing.state, "no such file" in missing.measured) == (State.FAILED, True)


def test_code_check_includes_a_custom_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of the algorithm may be in another folder than the configuration."""
    own = ADDITION.parent / "custom/simpo.py"
    settings, _ = examine_module.check_configuration(
        write_config(tmp_path),
        (f"algorithm={{name: '{own}:SimPO', batch_size: 8}}", "dataset.type=preference"),
        tmp_path,
    )
    assert settings is not None
    asked: list[Code] = []
    monkeypatch.setattr(
        examine_module, "check_trial", lambda *given, **_: asked.append(given[2]) or []
    )
    examine_module.check_trial_files(settings, make_plan(settings, scheduler="local"), 1.0)
    assert own in asked[0].paths


def test_job_is_not_submitted_for_an_invalid_configuration(tmp_path: Path) -> None:
    """The job might run on other hosts, or as another user, than the trial."""
    path = write_config(tmp_path)
    found = look(tmp_path / "r", config=path, overrides=("sed=3",), job=True)
    assert (found["job"].state, found["job"].measured) == (State.FAILED, "was not submitted")
    assert "same directory" not in found


def test_scheduler_check_fails_if_slurm_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    for name in ("sbatch", "scontrol"):
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert look(tmp_path / "r", scheduler="local")["scheduler"].state is State.OK
    for scheduler in ("auto", "slurm"):
        assert look(tmp_path / "r", scheduler=scheduler)["scontrol"].state is State.FAILED
    error = "fatal: Could not establish a configuration source"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '{error}' >&2\nexit 1\n")
    assert look(tmp_path / "r", scheduler="auto")["scheduler"].state is State.WARNING


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    """Make a Slurm whose controller answers, with a fake queue."""
    fake = FakeScheduler()
    rows = [HostRow("n0", "idle", 0), HostRow("n1", "mixed", 0), HostRow("n2", "down*", 0)]
    monkeypatch.setattr(SlurmClient, "ping", lambda self: None)
    monkeypatch.setattr(SlurmClient, "version", lambda self: "22.05.8")
    monkeypatch.setattr(SlurmClient, "hosts", lambda self, partition: rows)
    monkeypatch.setattr(job_module, "make", lambda kind: fake)
    return fake


def test_job_that_does_not_start_is_cancelled_and_reported(
    tmp_path: Path, slurm: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_module, "SAY_EVERY_S", 0.0)
    slurm.tasks = [task(0, JobState.PENDING, reason="Priority")]
    monkeypatch.setattr(FakeScheduler, "cancel", _forget)
    said: list[str] = []
    found = look(tmp_path / "r", said, scheduler="slurm", job=True, timeout_s=0.5)
    assert "PENDING (Priority) after 0 s; it was cancelled" in found["job"].measured
    assert any("job 41_0: PENDING (Priority), for" in line for line in said)
    assert not (tmp_path / "r").exists()
    (request,) = slurm.requests
    assert [group.hosts for group in request.groups] == [2]
    assert request.options["slurm"]["time"] == job_module.MINUTES


def _forget(self: FakeScheduler, jobs: object, *, after: int = -1) -> None:
    self.tasks = []


def test_job_that_cannot_be_cancelled_is_reported(
    tmp_path: Path, slurm: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_jobs, "LEAVE_TIMEOUT_S", 0.0)
    slurm.tasks = [task(0, JobState.PENDING, reason="Priority")]
    what = Examination(None, (), tmp_path, tmp_path, "slurm", True, 0.1)
    advice = [one.advice for one in examine(what, lambda text: None) if one.name == "job"]
    assert len(advice) == 2
    assert "end it with scancel" in advice


def test_output_of_a_job_without_results_is_shown(
    tmp_path: Path, slurm: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_module, "LATE_S", 0.0)
    submit = slurm.submit

    def run(request: SubmissionRequest) -> Any:
        log = request.run.batch_log("doctor", "slurm-41_0")
        log.parent.mkdir(parents=True)
        log.write_text("srun: error: no such partition\n")
        slurm.tasks = [task(0, JobState.FAILED, reason="NonZeroExitCode")]
        return submit(request)

    monkeypatch.setattr(slurm, "submit", run)
    check = look(tmp_path / "r", scheduler="slurm", job=True)["job"]
    assert check.state is State.FAILED
    assert "no result from host 0, 1 of 2: job 41_0: FAILED (NonZeroExitCode)" in check.measured
    assert check.measured.endswith("srun: error: no such partition")


def test_rejected_job_is_a_failed_check(
    tmp_path: Path, slurm: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(request: SubmissionRequest) -> None:
        raise SchedulerError("sbatch failed (1): invalid account")

    monkeypatch.setattr(slurm, "submit", reject)
    found = look(tmp_path / "r", scheduler="slurm", job=True)
    assert "invalid account" in found["job"].measured
    assert not (tmp_path / "r").exists()


def test_job_has_the_resources_of_the_configuration(
    tmp_path: Path, slurm: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [HostRow(f"n{index}", "idle", 8) for index in range(4)]
    monkeypatch.setattr(SlurmClient, "hosts", lambda self, partition: rows)
    monkeypatch.setattr(job_module, "LATE_S", 0.0)
    config = write_config(tmp_path)
    shape = ("actor.backend=fsdp:d8", "cluster.workers_per_host=2")
    look(tmp_path / "r", config=config, overrides=shape, scheduler="slurm", job=True)
    (request,) = slurm.requests
    (group,) = request.groups
    assert (group.hosts, group.workers_per_host, group.gpus_per_worker) == (4, 2, 1)
    assert group.links == 1


@pytest.mark.parametrize(("kind", "hosts"), [("local", 1), ("slurm", 2)])
def test_second_host_is_requested_only_from_slurm(
    monkeypatch: pytest.MonkeyPatch, kind: str, hosts: int
) -> None:
    rows = [HostRow(f"n{index}", "idle", 0) for index in range(4)]
    monkeypatch.setattr(SlurmClient, "hosts", lambda self, partition: rows)
    assert examine_module._group(kind, Cluster(), None).hosts == hosts


def test_doctor_command_prints_checks_and_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURMRL_ROOT", str(tmp_path / "runs"))
    umask = os.umask(0o077)
    try:
        assert main(["doctor", "--scheduler", "local", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["failed"] == 0
        assert {"name", "state", "measured", "advice", "where", "values"} == set(shown["checks"][0])
        assert main(["doctor", "--scheduler", "local", "--root", "/proc/x"]) == 1
        text = capsys.readouterr().out
        assert "FAILED" in text
        assert "add --job" in text.splitlines()[-1]
    finally:
        os.umask(umask)


def test_hosts_with_equal_results_share_a_row() -> None:
    from slurmrl.cli.site import _together
    from slurmrl.desk.doctor import ok, warning

    hosts = [f"n{index}" for index in range(6)]
    same = [ok("python", "3.11").at(host) for host in hosts[:2]]
    times = [ok("latency", f"{index} ms").at(host) for index, host in enumerate(hosts)]
    odd = [warning("python", "3.9", "upgrade").at("n5")]
    groups = _together([*same, *times, *odd])
    assert [(group[0].name, len(group)) for group in groups] == [
        ("python", 2),
        ("python", 1),
        ("latency", 6),
    ]
