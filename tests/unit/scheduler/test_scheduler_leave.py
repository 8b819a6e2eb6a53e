"""Tests of a job that leaves a host on which nothing can start, with scripted Slurm commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmrl.errors import CorruptFileError, SchedulerError, UsageError
from slurmrl.run import hosts
from slurmrl.run.history.slots import Kind, Record, pack
from slurmrl.run.hosts import (
    AFTER_SETUP,
    EARLY_TRAPS,
    avoid,
    avoided,
    blame,
    chosen,
    failed_starts,
    guard_command,
    include,
    leave_functions,
    newest_failed_starts,
    record_start,
    try_module,
)
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler import base, chain, submission
from slurmrl.scheduler.slurm import SlurmScheduler
from tests.support.scripted_slurm import Slurm

JOB = {
    "SLURM_JOB_ID": "43",
    "SLURM_ARRAY_JOB_ID": "41",
    "SLURM_ARRAY_TASK_ID": "2",
    "SLURMD_NODENAME": "n1",
}
COMMAND = """\
#!/bin/sh
echo "$(basename "$0") $*" >> "$SAID"
case "$(basename "$0") $*" in
    sbatch*"$IMPOSSIBLE"*) echo "node configuration is not available" >&2; exit 1;;
    fail*) exit "$FAIL_CODE";;
    squeue*) printf '%s\\n' '41 job' '57 job.1' '9 job.x' '8 other';;
esac
"""

Leave = Callable[..., list[str]]


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    found = RunPaths(tmp_path / "it's a run")
    for directory in found.directories():
        directory.mkdir()
    return found


@pytest.fixture
def run_leave(paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Leave:
    """Run shell text in a job after the functions, and return the calls of Slurm."""
    monkeypatch.setattr(hosts, "FIRST_S", 0)
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "scontrol", "squeue", "fail"):
        (folder / name).write_text(COMMAND)
        (folder / name).chmod(0o700)

    def run(
        text: str,
        *,
        host: str = "n1",
        restart: int = 0,
        impossible: str = "never",
        fail_code: int = 0,
    ) -> list[str]:
        said = tmp_path / "said"
        said.write_text("")
        script = f"{leave_functions(paths.run, Path('job.sh'), 'job', 'n8', 3, 'fail')}\n{text}"
        environ = {**os.environ, **JOB, "SAID": str(said), "IMPOSSIBLE": impossible}
        environ["FAIL_CODE"] = str(fail_code)
        environ |= {"PATH": f"{folder}:{os.environ['PATH']}", "SLURMD_NODENAME": host}
        environ |= {"SLURM_RESTART_COUNT": str(restart)}
        done = subprocess.run(
            ["bash", "-c", script], env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1, done.stdout + done.stderr
        return said.read_text().splitlines()

    return run


def test_failed_host_is_excluded_from_queued_jobs_and_job_is_requeued(
    paths: RunPaths, run_leave: Leave
) -> None:
    said = run_leave("""slurmrl_leave 'python: "no" such\\file\n'""")
    (bad,) = avoided(paths)
    assert (bad.host, bad.why, bad.start) == ("n1", "python: no suchfile ", "43.0")
    assert newest_failed_starts(paths) == failed_starts(paths, "43.0") == [bad]
    assert said == [
        "sbatch --test-only --exclude=n1,n8 job.sh",
        f"squeue -h -t PENDING -o %F %j -u {os.getuid()}",
        "scontrol update JobId=41 ExcNodeList=n1,n8",
        "scontrol update JobId=57 ExcNodeList=n1,n8",
        "scontrol requeue 41_2",
        "scontrol update JobId=41_2 ExcNodeList=n1,n8",
    ]
    assert [path.name for path in paths.hosts.iterdir() if path.name.startswith(".")] == []


def test_host_is_not_excluded_if_none_would_remain(paths: RunPaths, run_leave: Leave) -> None:
    run_leave("slurmrl_leave broken", host="n1")
    said = run_leave("slurmrl_leave broken", host="n2", restart=1, impossible="n1,n2")
    assert [one.host for one in avoided(paths)] == ["n1"]
    assert [one.host for one in newest_failed_starts(paths)] == ["n1", "n2"]
    assert said[-1] == "scontrol update JobId=41_2 ExcNodeList=n1,n8"


def test_pauses_between_failed_starts_grow_up_to_a_limit(
    paths: RunPaths, run_leave: Leave, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "FIRST_S", 5)
    functions = leave_functions(paths.run, Path("job.sh"), "job", "")
    pauses = "sleep() { echo $1; }; for n in 1 2 3 7 20; do slurmrl_pause $n; done | grep -v slurm"
    done = subprocess.run(
        ["sh", "-c", f"{functions}\n{pauses}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["5", "10", "20", "300", "300"]
    monkeypatch.setattr(hosts, "FIRST_S", 0)
    monkeypatch.setattr(hosts, "MOST_FAILED", 1)
    assert "scontrol requeue 41_2" in run_leave("slurmrl_leave broken")
    assert run_leave("slurmrl_leave broken", restart=1) == []
    paths.history.joinpath("00000000").touch()  # an incarnation began meanwhile
    assert "scontrol requeue 41_2" in run_leave("slurmrl_leave broken", restart=2)


def test_job_being_cancelled_is_not_requeued(paths: RunPaths, run_leave: Leave) -> None:
    assert run_leave(f"{EARLY_TRAPS}\nkill -TERM $$\nsleep 1 || exit 1") == []
    assert failed_starts(paths) == []


@pytest.mark.parametrize("text", ["false", "exit 9", "exit 0", "exec /nowhere/python"])
def test_setup_lines_that_exit_count_as_a_host_failure(
    paths: RunPaths, run_leave: Leave, text: str
) -> None:
    assert "scontrol requeue 41_2" in run_leave(f"{EARLY_TRAPS}\n{text}")
    assert [one.host for one in avoided(paths)] == ["n1"]


SETUP = f"{EARLY_TRAPS}\nset -e\nexport A=1\ngrep 'no \"such\"' $A /nowhere\n{AFTER_SETUP}"
REASON = """cluster.slurm.setup ended with exit code 2 at: grep 'no "such"' $A /nowhere"""


def test_setup_line_that_fails_on_several_hosts_is_a_user_error(
    paths: RunPaths, run_leave: Leave
) -> None:
    """The reason of the trial's end contains the line, and no host stays excluded."""
    avoid(paths, "n7", "another reason")
    for restart, host in enumerate(("n1", "n2.x")):
        assert "scontrol requeue 41_2" in run_leave(SETUP, host=host, restart=restart)
    assert [one.host for one in avoided(paths)] == ["n1", "n2.x", "n7"]
    said = run_leave(SETUP, host="n3", restart=2)
    tried = "it failed in the same way on every host tried: n1, n2.x, n3"
    assert [line for line in said if line.startswith("fail")] == [f"fail {REASON}; {tried}"]
    assert not any("requeue" in line for line in said)
    assert [one.host for one in avoided(paths)] == ["n7"]


def test_setup_line_that_fails_on_the_only_host_is_a_user_error(
    paths: RunPaths, run_leave: Leave
) -> None:
    assert "scontrol requeue 41_2" in run_leave(SETUP, impossible="n1")
    said = run_leave(SETUP, restart=1, impossible="n1")
    assert any(line.startswith(f"fail {REASON}; ") and line.endswith(": n1") for line in said)


@pytest.mark.parametrize("why", ["other failures", "it has worked", "not the set-up", "no Python"])
def test_other_start_failures_are_host_failures(
    paths: RunPaths, run_leave: Leave, why: str
) -> None:
    """Covers hosts that fail in different ways, failures after the set-up lines, and failures after
    an incarnation of this submission. If the trial cannot be ended, the job is requeued.
    """
    begun = pack(Record(0, Kind.BEGIN, 1, 0.0, {"job": "1", "submission": 3}), "nonce")
    if why == "it has worked":
        paths.history.joinpath("00000000").write_bytes(begun)
    for restart, host in enumerate(("n1", "n2", "n3", "n4")):
        text = SETUP
        if why == "other failures" and restart % 2:
            text = f"{EARLY_TRAPS}\nexit {restart}"
        elif why == "not the set-up":
            text = f"{EARLY_TRAPS}\n{AFTER_SETUP}\nexit 3"
        code = int(why == "no Python")
        said = run_leave(text, host=host, restart=restart, fail_code=code)
        assert "scontrol requeue 41_2" in said
        assert [line for line in said if line.startswith("fail")] == [] or why == "no Python"
    assert len(avoided(paths)) == 4


def test_setup_failures_of_another_submission_are_ignored(
    paths: RunPaths, run_leave: Leave
) -> None:
    """A line may have been changed by ``resume``."""
    begun = pack(Record(0, Kind.BEGIN, 1, 0.0, {"job": "1", "submission": 30}), "nonce")
    paths.history.joinpath("00000000").write_bytes(begun)
    for restart, host in enumerate(("n1", "n2", "n3")):
        said = run_leave(SETUP, host=host, restart=restart)
    assert any(line.startswith("fail") for line in said)


def test_script_splits_words_at_spaces_after_setup_line_that_sets_ifs(run_leave: Leave) -> None:
    text = f"{EARLY_TRAPS}\nset -eu; IFS=$'\\n\\t'\n{AFTER_SETUP}\nblock='env true'"
    assert run_leave(f"{text}\n$block && trap - EXIT; exit 1") == []


def test_job_starts_if_setup_lines_remove_srun_from_path(run_leave: Leave) -> None:
    attempt = try_module(sys.executable, "slurmrl.workers.supervisor")
    text = f"{EARLY_TRAPS}\nexport PATH=/nowhere\n{AFTER_SETUP}\n{attempt}"
    assert run_leave(f'{text} && echo starts > "$SAID"; trap - EXIT; exit 1') == ["starts"]


def test_setup_line_that_breaks_path_requeues_the_job(
    paths: RunPaths, run_leave: Leave, tmp_path: Path
) -> None:
    srun = tmp_path / "only_srun" / "srun"
    srun.parent.mkdir()
    srun.touch(mode=0o700)
    attempt = try_module(sys.executable, "slurmrl.workers.supervisor")
    text = f"{EARLY_TRAPS}\nexport PATH={srun.parent}\n{AFTER_SETUP}\n{attempt} || slurmrl_leave"
    said = run_leave(f'{text} "$slurmrl_said"')
    assert "scontrol requeue 41_2" in said
    (bad,) = avoided(paths)
    assert (bad.host, "timeout: " in bad.why) == ("n1", True)


def test_failure_without_host_fault_is_counted_once(paths: RunPaths, run_leave: Leave) -> None:
    run_leave('slurmrl_give_back "srun: no" ""')
    run_leave('slurmrl_give_back "srun: no" ""')
    assert [(one.host, one.why) for one in newest_failed_starts(paths)] == [("", "srun: no")]
    assert avoided(paths) == []


@pytest.mark.usefixtures("run_leave")
@pytest.mark.parametrize("replaced", [False, True], ids=["no shell", "no Slurm"])
def test_job_is_requeued_if_its_path_lacks_commands(
    paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """``cluster.env`` and the variables file may replace PATH in the batch process."""
    variables = {**JOB, "PATH": f"{tmp_path}/bin", "SAID": f"{tmp_path}/said", "IMPOSSIBLE": "no"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(submission, "directive", lambda *_: "job")
    monkeypatch.setattr(submission, "excluded_by_user", lambda *_: "")
    monkeypatch.setattr(base, "command_environment", dict)
    link = chain.Link.here(paths, 1, "trainer")
    if replaced:
        monkeypatch.setenv("PATH", "/nowhere")
    chain.give_back(link, "srun cannot start", "n1")
    assert "scontrol requeue 41_2" in (tmp_path / "said").read_text()
    assert [one.why for one in avoided(paths)] == ["srun cannot start"]


@pytest.mark.parametrize("module", ["slurmrl.workers.agent", "slurmrl.no_such_module"])
@pytest.mark.parametrize("path", [os.environ["PATH"], "/nowhere"], ids=["path", "no path"])
def test_each_host_checks_its_interpreter(paths: RunPaths, module: str, path: str) -> None:
    program, *command = guard_command(paths.run, sys.executable, module)
    done = subprocess.run(
        [shutil.which(program) or program, *command, "/bin/echo", "it runs"],
        env={**os.environ, **JOB, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if module == "slurmrl.workers.agent" and path != "/nowhere":
        assert (done.returncode, done.stdout) == (0, "it runs\n")
        assert failed_starts(paths) == []
    else:
        assert done.returncode == 1
        (bad,) = failed_starts(paths, "43.0")
        assert bad.host == "n1"
        why = (
            "timeout: not found" if path == "/nowhere" else "No module named slurmrl.no_such_module"
        )
        assert bad.why.endswith(why)


def test_host_is_excluded_after_two_failed_incarnations(paths: RunPaths) -> None:
    assert not blame(paths, "n1", 3, "lost")
    assert not blame(paths, "n1", 3, "lost")
    assert not blame(paths, "n2", 4, "lost")
    assert blame(paths, "n1", 5, "lost")
    assert blame(paths, "n2", 4, "failed", (0, 1)), "a rollout task counts like an incarnation"


def test_excluded_hosts_are_included_again(paths: RunPaths) -> None:
    for host in ("n1", "n2"):
        avoid(paths, host, "broken")
        record_start(paths, 0, "43.0", host, "broken")
    with pytest.raises(
        UsageError, match=r"n3: not excluded from this trial's jobs; excluded hosts: n1, n2"
    ):
        chosen(paths, ["n1", "n3"])
    include(paths, chosen(paths, ["n1"]))
    assert [one.host for one in avoided(paths)] == ["n2"]
    assert [one.host for one in failed_starts(paths)] == ["n2"]
    assert chosen(paths, ["all"]) == ["n2"]


@pytest.mark.parametrize("text", ["", "[]", '{"host": 1}', '{"why": ["n1"]}', "{" * 10_000])
def test_invalid_exclusion_record_is_corrupt(paths: RunPaths, text: str) -> None:
    paths.hosts.joinpath("avoid.n1.json").write_text(text)
    with pytest.raises(CorruptFileError, match=r"avoid\.n1\.json"):
        avoided(paths)


def test_jobs_queued_later_exclude_the_host(run: RunPaths) -> None:
    assert submission.exclude_option(run, 1, "trainer") == ()
    avoid(run, "n1", json.dumps("broken"))
    assert submission.exclude_option(run, 1, "trainer") == ("--exclude=n1",)


@pytest.mark.parametrize(
    ("refusal", "changed"),
    [
        ("", True),
        ("41_1: Job is no longer pending execution", True),
        ("Access/permission denied", False),
    ],
)
def test_queued_jobs_get_the_exclusion_or_are_replaced(
    run: RunPaths,
    slurm: Slurm,
    scheduler: SlurmScheduler,
    monkeypatch: pytest.MonkeyPatch,
    refusal: str,
    changed: bool,
) -> None:
    told: list[tuple[str, str]] = []

    def exclude(self: Slurm, elements: str, wanted: str) -> None:
        told.append((elements, wanted))
        if refusal:
            raise SchedulerError(refusal)

    monkeypatch.setattr(Slurm, "exclude", exclude, raising=False)
    monkeypatch.setattr(Slurm, "try_out", lambda *_: None)
    assert scheduler.avoid(run, 1, "trainer", "n1", "broken")
    assert told == [("41_[1-2]", "n1")], "the queued links get it at once"
    scheduler.keep_off(run, 1, "trainer", by="41_0")
    assert told == [("41_[1-2]", "n1")] * 2
    assert slurm.done == ([] if changed else ["cancel 41_[1-2]"])
    assert len(slurm.jobs) == (1 if changed else 2)
    assert changed or "--exclude=n1" in slurm.options[-1]
