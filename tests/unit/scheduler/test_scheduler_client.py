"""The client of Slurm's commands, and the Slurm scheduler on top of it, with scripted commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.env import user_name
from slurmrl.errors import EnvironmentFailure, SchedulerError, UnknownNameError
from slurmrl.scheduler import base, choose, extensions, make, states
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.local_chain import LocalScheduler
from slurmrl.scheduler.slurm import SlurmScheduler
from slurmrl.scheduler.states import QueueRow
from tests.scheduler_contract import request_of
from tests.support.scripted_slurm import Slurm


def install(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o700)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An otherwise empty PATH."""
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_failure_message_has_command_and_output(commands: Path) -> None:
    install(commands, "sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    with pytest.raises(SchedulerError, match=r"sbatch .*failed \(1\): .*invalid partition"):
        SlurmClient().submit(Path("script.sh"))


def test_missing_command_is_named(commands: Path) -> None:
    with pytest.raises(SchedulerError, match="squeue is not on PATH"):
        SlurmClient().queue(["1"])


def test_hanging_command_is_abandoned(commands: Path) -> None:
    install(commands, "scontrol", "while :; do :; done")
    with pytest.raises(SchedulerError, match="did not answer"):
        SlurmClient(timeout_s=0.2).ping()


def test_job_unknown_to_slurm_is_no_error(commands: Path) -> None:
    install(
        commands, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    )
    assert SlurmClient().queue(["1"]) == []


def test_scontrol_is_used_if_squeue_is_another_program(commands: Path) -> None:
    """Some clusters replace squeue by another program."""
    recorded = Path(__file__).with_name("recorded") / "scontrol-24.11.txt"
    install(commands, "squeue", "echo 'squeue: unrecognized option --Format' >&2; exit 2")
    shown = f'[ "$4" = 1 ] && {{ while read -r line; do echo "$line"; done <"{recorded}"; exit; }}'
    forgotten = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    install(commands, "scontrol", f"{shown}\n{forgotten}")
    assert SlurmClient().queue(["1", "43"]) == states.control(recorded.read_text())
    install(commands, "scontrol", "exit 1")
    with pytest.raises(SchedulerError, match="unrecognized option"):
        SlurmClient().queue(["41"])


def test_signaling_an_ended_job_is_no_error(commands: Path) -> None:
    install(commands, "scancel", "exit 1")
    SlurmClient().signal("KILL", ["41_0"], steps=True)
    SlurmClient().cancel(["41_0"])
    install(commands, "scancel", "echo 'scancel: error: Access denied' >&2; exit 1")
    with pytest.raises(SchedulerError, match="Access denied"):
        SlurmClient().cancel(["41_0"])


def test_slurm_commands_ignore_option_variables_of_the_environment(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CONF", "/the/conf")
    install(
        commands,
        "squeue",
        'echo "1|0|RUNNING|n|$SLURM_CONF|0|1:00|N/A|0|$SQUEUE_FORMAT$SLURM_JOB_ID|"',
    )
    (row,) = SlurmClient().queue(["1"])
    assert (row.name, row.reason) == ("/the/conf", "")


def test_job_inherits_only_listed_variables() -> None:
    environ = {"HOME": "/h", "PATH": "/bin", "TOKEN": "x", "SLURM_CONF": "c", "SBATCH_QOS": "q"}
    assert base.job_environment(environ) == {"HOME": "/h", "PATH": "/bin", "SLURM_CONF": "c"}


def test_job_inherits_nccl_variables() -> None:
    """Also covers the local scheduler, and jobs that a job submits or requeues."""
    given = {"NCCL_DEBUG": "INFO", "TORCH_NCCL_ENABLE_TIMING": "1", "TORCH_FR_BUFFER_SIZE": "9"}
    environ = {**given, "MY_NCCL_TOKEN": "x", "HF_TOKEN": "y"}
    assert base.job_environment(environ) == given
    assert base.local_environment(environ) == given
    assert base.job_environment({}, base.inherited_environment(environ)) == given


UNCONFIGURED = "scontrol: fatal: Could not establish a configuration source"


def test_auto_is_local_without_slurm(commands: Path) -> None:
    assert choose("auto", asks_slurm=False) == "local"
    install(commands, "sbatch", "exit 0")
    install(commands, "scontrol", f"echo '{UNCONFIGURED}' >&2; exit 1")
    assert choose("auto", asks_slurm=False) == "local"
    install(commands, "scontrol", "exit 0")
    assert choose("auto", asks_slurm=False) == "slurm"


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ("", "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)"),
        ("", "Slurmctld(primary) at head is DOWN"),
        ("", "scontrol: fatal: Unable to process configuration file"),
        ("", f"error: _fetch_child: failed to fetch remote configs\n{UNCONFIGURED}"),
        ("/nowhere/slurm.conf", UNCONFIGURED),
        ("/nowhere/slurm.conf", "error: s_p_parse_file: cannot stat file /nowhere/slurm.conf"),
    ],
)
def test_auto_is_slurm_on_a_cluster_node_without_controller(
    commands: Path, monkeypatch: pytest.MonkeyPatch, conf: str, words: str
) -> None:
    """slurmrl never runs a trial on a login node because the controller does not answer."""
    monkeypatch.setenv("SLURM_CONF", conf)
    install(commands, "sbatch", "exit 0")
    install(commands, "scontrol", f"echo '{words}' >&2; exit 1")
    assert choose("auto", asks_slurm=False) == "slurm"


def test_auto_is_slurm_for_slurm_settings_without_controller(commands: Path) -> None:
    """The machine has neither sbatch nor a controller, and `check` rejects the submission."""
    assert choose("auto", asks_slurm=True) == "slurm"
    assert choose("local", asks_slurm=True) == "local"
    install(commands, "sbatch", "exit 0")
    install(commands, "scontrol", "echo 'Slurmctld(primary) at head is DOWN' >&2; exit 1")
    assert choose("auto", asks_slurm=True) == "slurm"
    words = "nothing was submitted.*Slurmctld.primary. at head is DOWN.*--scheduler local"
    with pytest.raises(SchedulerError, match=words):
        make("slurm").check()


def test_scheduler_names_are_checked(commands: Path) -> None:
    assert choose("slurm", asks_slurm=False) == "slurm"
    assert isinstance(make("local"), LocalScheduler)
    with pytest.raises(UnknownNameError, match="did you mean 'slurm'"):
        choose("slrum", asks_slurm=False)
    with pytest.raises(EnvironmentFailure, match="--scheduler local"):
        make("slurm").check()


def row(elements: tuple[int, ...], state: str, name: str = "name") -> QueueRow:
    return QueueRow("41", elements, state, (), name, "")


def test_cancel_names_ranges_of_elements(slurm: Slurm, scheduler: SlurmScheduler) -> None:
    slurm.rows = [row((0,), "FAILED"), row((2,), "RUNNING"), row((3, 4, 5, 7), "PENDING")]
    scheduler.cancel({"trainer": ("41",)})
    scheduler.cancel({"trainer": ("41",)}, spare="41_2")
    assert slurm.done == ["cancel 41_[2-5,7]", "cancel 41_[3-5,7]"]


def test_submission_with_a_lost_reply_is_found_by_name(
    tmp_path: Path, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    """A rejected submission is not searched for."""
    request = request_of(tmp_path, "pass")
    slurm.reject = "sbatch failed (1): Socket timed out on send/recv operation"
    slurm.rows = [row((0, 1), "PENDING", request.job_name("trainer"))]
    assert scheduler.submit(request) == {"trainer": ("41",)}
    slurm.rows = []
    with pytest.raises(SchedulerError, match="Socket timed out"):
        scheduler.submit(request)
    slurm.looked_for.clear()
    slurm.reject = "invalid qos"
    with pytest.raises(SchedulerError, match="invalid qos"):
        scheduler.submit(request)
    assert slurm.looked_for == []


ASSOCIATIONS = """\
Current Association Manager state

Association Records

ClusterName=bed Account=root UserName= Priority=0 ID=1
    GrpJobs=N(3) GrpJobsAccrue=N(0)
    GrpSubmitJobs=N(3) GrpWall=N(0.00)
    MaxJobs= MaxJobsAccrue= MaxSubmitJobs= MaxWallPJ=
ClusterName=bed Account=lab UserName= Priority=0 ID=3
    GrpSubmitJobs=20(15) GrpWall=N(0.00)
ClusterName=bed Account=lab UserName=me(1000) Partition= Priority=0 ID=4
    ParentAccount= Lft= DefAssoc=Yes
    GrpSubmitJobs=N(3) GrpWall=N(0.00)
    MaxJobs=2(0) MaxJobsAccrue= MaxSubmitJobs=9(3) MaxWallPJ=
ClusterName=bed Account=poor UserName=me(1000) Partition= Priority=0 ID=5
    ParentAccount= Lft= DefAssoc=No
    MaxJobs=2(0) MaxJobsAccrue= MaxSubmitJobs=1(1) MaxWallPJ=
"""


@pytest.mark.parametrize(
    ("user", "account", "room"),
    [("me", None, 5), ("me", "lab", 5), ("me", "poor", 0), ("you", None, None)],
)
def test_job_limit_gives_the_number_of_additional_jobs(
    user: str, account: str | None, room: int | None
) -> None:
    assert extensions.submit_room(ASSOCIATIONS, user, account) == room


def test_cluster_without_job_arrays_is_rejected() -> None:
    assert extensions.array_limit({"MaxArraySize": "5"}) == 5
    assert extensions.array_limit({}) is None
    with pytest.raises(EnvironmentFailure, match="job arrays are disabled"):
        extensions.array_limit({"MaxArraySize": "0"})


@pytest.mark.parametrize(("most", "links"), [(None, 6), (3, 3), (1, 1)])
def test_too_long_chain_is_shortened_with_a_message(
    tmp_path: Path,
    slurm: Slurm,
    scheduler: SlurmScheduler,
    most: int | None,
    links: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The chain is shortened to the known limit (room for 6), and by halves if sbatch rejects
    it.
    """
    request = request_of(tmp_path, "pass", links=12)
    slurm.limits = ASSOCIATIONS.replace("UserName=me(", f"UserName={user_name()}(")
    slurm.limits = slurm.limits.replace("20(15)", "N(15)")
    slurm.most = most
    scheduler.submit(request)
    script = request.run.submission_script(1, "trainer").read_text()
    assert f"--array=0-{links - 1}%1" in script
    assert f"accepts only {links} of the" in caplog.text


def test_rejected_single_job_is_an_error(
    tmp_path: Path, slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    slurm.most = 0
    with pytest.raises(SchedulerError, match="AssocMaxSubmitJobLimit"):
        scheduler.submit(request_of(tmp_path, "pass", links=4))


def test_accounting_is_queried_once_for_jobs_missing_in_the_queue(
    slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    slurm.rows = [row((2,), "RUNNING"), row((3,), "PENDING")]
    slurm.accounts = [row((0,), "TIMEOUT"), row((1,), "PREEMPTED"), row((2,), "RUNNING")]
    for _ in range(2):
        found = scheduler.query({"trainer": ("41",)})
        assert [task.raw for task in found] == ["TIMEOUT", "PREEMPTED", "RUNNING", "PENDING"]
    assert slurm.asked == [("41",)]


def test_element_that_ran_overrides_its_cancelled_array_row(
    slurm: Slurm, scheduler: SlurmScheduler
) -> None:
    """The rows are from sacct of 22.05, for an array that was cancelled when its first element
    started.
    """
    slurm.accounts = states.accounting(
        "41_0|CANCELLED by 0|0:0|n0|x|2026-11-21T16:57:11|None\n"
        "41_[0-2%1]|CANCELLED by 0|0:0|None assigned|x|None|None\n"
    )
    found = scheduler.query({"trainer": ("41",)})
    assert [(task.element, task.hosts) for task in found] == [(0, ("n0",)), (1, ()), (2, ())]


def test_missing_accounting_is_no_error(commands: Path) -> None:
    assert SlurmClient().accounting(["1"]) is None
    install(commands, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert SlurmClient().accounting(["1"]) is None
    install(commands, "sacct", "echo 'sacct: error: Connection refused' >&2; exit 1")
    with pytest.raises(SchedulerError, match="refused"):
        SlurmClient().accounting(["1"])
