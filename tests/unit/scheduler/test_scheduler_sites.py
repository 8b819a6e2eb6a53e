"""Sites whose plugins or wrappers of sbatch print messages, change jobs or refuse them."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmrl.errors import SchedulerError
from slurmrl.scheduler.client import SlurmClient, may_have_worked
from slurmrl.scheduler.slurm import SlurmScheduler
from tests.scheduler_contract import request_of


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a PATH with a Slurm whose queue is empty and whose sbatch is missing."""
    folder = tmp_path / "commands"
    folder.mkdir()
    for name in ("scontrol", "squeue"):
        install(folder, name, "exit 0")
    monkeypatch.setenv("PATH", str(folder))
    return folder


def install(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o700)


@pytest.mark.parametrize(
    "line",
    [
        "sbatch: time limit is now 2 minutes",
        "sbatch: error: time limit is now 2 minutes",
        "  time limit is now 2 minutes",
    ],
)
def test_message_of_a_plugin_is_shown_after_the_job_is_queued(
    commands: Path, caplog: pytest.LogCaptureFixture, line: str
) -> None:
    install(commands, "sbatch", f"echo '{line}' >&2; echo >&2; echo 41")
    assert SlurmClient().submit(Path("script.sh")) == "41"
    assert caplog.messages == ["message of sbatch: time limit is now 2 minutes"]


def test_rejection_text_of_several_lines_has_no_prefixes(commands: Path) -> None:
    lines = (
        "sbatch: error: Never on Mondays.",
        "sbatch: error:   Ask us.",
        "allocation failure: Unspecified error",
    )
    install(commands, "sbatch", f"printf '%s\\n' {' '.join(map(repr, lines))} >&2; exit 1")
    told = SlurmClient().rejection(Path("script.sh"))
    assert told == "Never on Mondays. Ask us. allocation failure: Unspecified error"


def test_job_found_by_name_if_a_wrapper_prints_other_numbers(
    tmp_path: Path, commands: Path
) -> None:
    install(commands, "sbatch", "echo 41; echo 2026")
    request = request_of(tmp_path, "pass", links=1)
    name = request.job_name("trainer")
    install(commands, "squeue", f"echo '41|0|RUNNING|n0|{name}|0|1:00|N/A|0||'")
    assert SlurmScheduler().submit(request) == {"trainer": ("41",)}


@pytest.mark.parametrize("words", ["", "Submissions are closed", "Come back\nat 10:30."])
def test_job_is_not_queued_if_sbatch_prints_no_id_and_the_queue_lacks_it(
    tmp_path: Path, commands: Path, words: str
) -> None:
    install(commands, "sbatch", f"echo '{words}'")
    with pytest.raises(SchedulerError, match="submitted no job but printed") as caught:
        SlurmScheduler().submit(request_of(tmp_path, "pass", links=1))
    assert not may_have_worked(caught.value), "the caller removes the trial's directory"
    assert repr(words) in str(caught.value)


def test_job_is_not_queued_if_a_plugin_of_the_site_ends_with_the_code_of_a_signal(
    tmp_path: Path, commands: Path
) -> None:
    install(commands, "sbatch", "echo 'rejected: quota check failed (130)' >&2; exit 1")
    with pytest.raises(SchedulerError, match="quota check") as caught:
        SlurmScheduler().submit(request_of(tmp_path, "pass", links=1))
    assert not may_have_worked(caught.value), "the caller removes the trial's directory"


@pytest.mark.parametrize(
    "script",
    [
        "echo",
        "echo 'Socket timed out' >&2; exit 1",
        "echo 'Zero Bytes were transmitted or received' >&2; exit 1",  # The answer was lost.
        "echo 'Unexpected message received' >&2; exit 1",
        "kill -KILL $$",
        "exit 137",
    ],
)
def test_job_may_be_queued_if_neither_sbatch_nor_squeue_can_tell(
    tmp_path: Path, commands: Path, script: str
) -> None:
    install(commands, "sbatch", script)
    install(commands, "squeue", "echo 'Unexpected message received' >&2; exit 1")
    with pytest.raises(SchedulerError) as caught:
        SlurmScheduler().submit(request_of(tmp_path, "pass", links=1))
    assert may_have_worked(caught.value), "the caller keeps the trial's directory"
