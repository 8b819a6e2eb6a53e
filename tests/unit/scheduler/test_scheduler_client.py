"""The client of Slurm's commands, and the Slurm scheduler on top of it, with scripted commands."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from slurmrl.errors import EnvironmentFailure, SchedulerError, UnknownNameError
from slurmrl.scheduler import choose, environment, make
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.local import LocalScheduler
from slurmrl.scheduler.parse import QueueRow
from slurmrl.scheduler.slurm import SlurmScheduler
from tests.scheduler_contract import request_of


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


def test_a_failure_carries_the_command_and_its_words(commands: Path) -> None:
    install(commands, "sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    with pytest.raises(SchedulerError, match=r"sbatch .*failed \(1\): .*invalid partition"):
        SlurmClient().submit(Path("script.sh"))


def test_a_missing_command_is_named(commands: Path) -> None:
    with pytest.raises(SchedulerError, match="squeue is not on PATH"):
        SlurmClient().queue(["1"])


def test_a_command_that_hangs_is_given_up(commands: Path) -> None:
    install(commands, "scontrol", "while :; do :; done")
    with pytest.raises(SchedulerError, match="did not answer"):
        SlurmClient(timeout_s=0.2).ping()


def test_a_job_that_slurm_forgot_is_no_error(commands: Path) -> None:
    install(
        commands, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    )
    assert SlurmClient().queue(["1"]) == []


def test_commands_see_no_options_in_their_environment(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_CONF", "/the/conf")
    install(commands, "squeue", 'echo "1|0|RUNNING|n|$SLURM_CONF|$SQUEUE_FORMAT$SLURM_JOB_ID"')
    (row,) = SlurmClient().queue(["1"])
    assert (row.name, row.reason) == ("/the/conf", "")


def test_a_job_inherits_a_short_list() -> None:
    environ = {"HOME": "/h", "PATH": "/bin", "TOKEN": "x", "SLURM_CONF": "c", "SBATCH_QOS": "q"}
    assert environment.of_job(environ) == {"HOME": "/h", "PATH": "/bin", "SLURM_CONF": "c"}


def test_auto_is_local_without_slurm(commands: Path) -> None:
    assert choose("auto") == "local"
    install(commands, "sbatch", "exit 0")
    install(commands, "scontrol", "exit 1")
    assert choose("auto") == "local"
    install(commands, "scontrol", "exit 0")
    assert choose("auto") == "slurm"


def test_names_of_schedulers(commands: Path) -> None:
    assert choose("slurm") == "slurm"
    assert isinstance(make("local"), LocalScheduler)
    with pytest.raises(UnknownNameError, match="did you mean 'slurm'"):
        choose("slrum")
    with pytest.raises(EnvironmentFailure, match="--scheduler local"):
        make("slurm").check()


class ScriptedClient(SlurmClient):
    """Answers from a list of rows; remembers what was cancelled."""

    def __init__(self, rows: list[QueueRow], *, submit_error: str = "") -> None:
        super().__init__()
        self.rows = rows
        self.submit_error = submit_error
        self.cancelled: list[str] = []

    def submit(self, script: Path) -> str:
        if self.submit_error:
            raise SchedulerError(self.submit_error)
        return "41"

    def queue(self, jobs: Iterable[str]) -> list[QueueRow]:
        return self.rows

    def queue_by_name(self, names: Iterable[str]) -> list[QueueRow]:
        return [row for row in self.rows if row.name in names]

    def cancel(self, elements: Iterable[str]) -> None:
        self.cancelled += elements


def row(elements: tuple[int, ...], state: str, name: str = "name") -> QueueRow:
    return QueueRow("41", elements, state, (), name, "")


def test_cancel_names_ranges_of_elements() -> None:
    client = ScriptedClient(
        [row((0,), "FAILED"), row((2,), "RUNNING"), row((3, 4, 5, 7), "PENDING")]
    )
    SlurmScheduler(client).cancel({"trainer": "41"})
    SlurmScheduler(client).cancel({"trainer": "41"}, after=2)
    assert client.cancelled == ["41_[2-5,7]", "41_[3-5,7]"]


def test_nothing_to_cancel_asks_for_nothing() -> None:
    client = ScriptedClient([row((0,), "COMPLETED")])
    SlurmScheduler(client).cancel({"trainer": "41"})
    assert client.cancelled == []


def test_a_submission_whose_answer_was_lost_is_found_by_name(tmp_path: Path) -> None:
    request = request_of(tmp_path, "pass")
    lost = "sbatch failed (1): Socket timed out on send/recv operation"
    there = row((0, 1), "PENDING", request.job_name("trainer"))
    assert SlurmScheduler(ScriptedClient([there], submit_error=lost)).submit(request) == {
        "trainer": "41"
    }
    with pytest.raises(SchedulerError, match="Socket timed out"):
        SlurmScheduler(ScriptedClient([], submit_error=lost)).submit(request)


def test_a_refused_submission_is_not_searched_for(tmp_path: Path) -> None:
    request = request_of(tmp_path, "pass")
    there = row((0, 1), "PENDING", request.job_name("trainer"))
    with pytest.raises(SchedulerError, match="invalid qos"):
        SlurmScheduler(ScriptedClient([there], submit_error="invalid qos")).submit(request)


def test_this_process_has_an_identity() -> None:
    from slurmrl.scheduler.processes import ProcessId

    me = ProcessId.of(os.getpid())
    assert me is not None
    assert me.alive()
    assert not ProcessId(me.pid, me.start_ticks + 1).alive()
