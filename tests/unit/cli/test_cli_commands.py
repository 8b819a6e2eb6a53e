"""Commands on run directories that no process lives in."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from slurmrl.cli.main import main
from slurmrl.desk import proposal, submitting, trial_jobs
from slurmrl.desk.trial_checks import Finding
from slurmrl.env import user_name
from slurmrl.fsio import calls
from slurmrl.run.history.slots import END_OF_DATASET, Kind
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import JobIds, JobState, SubmissionRequest
from slurmrl.scheduler.batch_script import script
from tests.fake_runs import FakeRun, FakeScheduler, task, write_config


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURMRL_ROOT", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    fake = FakeScheduler()
    for module in (trial_jobs, proposal, submitting):
        monkeypatch.setattr(module, "make", lambda kind: fake)
    monkeypatch.setattr("slurmrl.scheduler.make", lambda kind: fake)
    return fake


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


# -- status ------------------------------------------------------------------------------------


def test_status_shows_all_trials_an_experiment_or_one_trial(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for experiment, trial in (("add", "1"), ("add", "2"), ("sub", "1")):
        FakeRun(root, experiment, trial).end(Kind.CANCELLED, reason="cancelled by me")
    assert main(["status", "--json"]) == 0
    assert [one["trial"] for one in printed(capsys)] == ["add/1", "add/2", "sub/1"]
    assert main(["status", "add", "--json"]) == 0
    assert [one["trial"] for one in printed(capsys)] == ["add/1", "add/2"]
    assert main(["status", "add/2", "--json"]) == 0
    assert printed(capsys)["state"] == "CANCELLED"
    assert main(["status", "sub/1", "add/1", "sub/1", "--json"]) == 0
    assert [one["trial"] for one in printed(capsys)] == ["sub/1", "add/1"]


def test_status_options_filter_and_sort_the_list(
    root: Path, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = {"1": Kind.FAILED, "2": Kind.FINISHED, "3": Kind.FAILED, "4": None}
    for trial, kind in ends.items():
        run = FakeRun(root, trial=trial)
        run.submission(time=1000.0 * (5 - int(trial)) if trial != "3" else 9000.0)
        if kind is not None:
            run.begin()
            run.end(kind, reason="x", step=1)
    orders = {"name": "1234", "age": "3124", "state": "4132"}
    for order, trials in orders.items():
        assert main(["status", "--json", "--sort", order]) == 0
        assert [one["trial"] for one in printed(capsys)] == [f"add/{name}" for name in trials]
    assert main(["status", "--state", "failed", "--state", "INTERRUPTED"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["TRIAL", "add/1", "add/3", "add/4"]
    assert main(["status", "--state", "pending"]) == 0
    assert capsys.readouterr().out == f"no PENDING trials in {root}\n"


def test_root_option_overrides_the_environment(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeRun(tmp_path / "elsewhere", "there")
    assert main(["status", "--json", "--root", "elsewhere"]) == 0
    assert [one["trial"] for one in printed(capsys)] == ["there/1"]


@pytest.fixture
def waiting(root: Path, scheduler: FakeScheduler) -> FakeRun:
    run = FakeRun(root)
    run.submission()
    scheduler.jobs[run.paths.run, 1] = {"trainer": ("41",)}
    scheduler.tasks = [task(0, JobState.PENDING, reason="Priority", words="others come first")]
    return run


def watch(monkeypatch: pytest.MonkeyPatch, *happenings: Any, arguments: Any = ()) -> int:
    """``status add/1 --watch``; at each pause the next thing happens."""
    waits = iter(happenings)
    monkeypatch.setattr("slurmrl.cli.following.time.sleep", lambda seconds: next(waits)())
    return main(["status", "add/1", "--watch", *arguments])


def test_watch_ends_without_jobs(
    waiting: FakeRun,
    scheduler: FakeScheduler,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The watch ends because nothing can change without jobs. If the scheduler does not answer,
    there may be jobs.
    """

    def silent() -> None:
        scheduler.problem = "squeue did not answer"

    def gone() -> None:
        scheduler.problem = None
        scheduler.tasks = []

    nothing = [lambda: None] * 2
    assert watch(monkeypatch, silent, *nothing, gone, lambda: None) == 0
    assert "INTERRUPTED" in capsys.readouterr().out.splitlines()[-1]


def test_watch_prints_only_changes_without_a_terminal(
    waiting: FakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = [lambda: None] * 5
    end = [lambda: waiting.end(Kind.CANCELLED, reason="cancelled by me")]
    assert watch(monkeypatch, *nothing, *end, arguments=["--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["PENDING", "CANCELLED"]


def test_watch_prints_changes_to_a_pipe_and_exits_with_1_on_failure(
    waiting: FakeRun,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = FakeRun(root, trial="2")
    other.end(Kind.CANCELLED, reason="cancelled by me")
    happenings = [lambda: None, lambda: waiting.end(Kind.FAILED, reason="NaN")]
    more = ["add/2", "add", "--exit-status"]
    assert watch(monkeypatch, *happenings, arguments=more) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    clock = r"\d\d:\d\d:\d\d"
    assert re.match(rf"{clock}  add/1  PENDING  step 0/60  pending", first)
    assert re.match(rf"{clock}  add/2  CANCELLED  step 0/\?  cancelled by me; ", second)
    assert re.fullmatch(rf"{clock}  add/1  FAILED  step 0/60  gave up: NaN", third)
    assert main(["status", "add/2", "--exit-status"]) == 0


def test_errors_of_json_commands_are_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FakeRun(root)
    for words, code in [(["add/9"], 2), (["--wach"], 2)]:
        assert main(["status", *words, "--json"]) == code
        output = capsys.readouterr()
        told = json.loads(output.out)
        assert told["exit_code"] == code
        assert told["error"] in output.err
        assert "did you mean" in output.err.lower()
    assert main(["status", "add/9"]) == 2
    assert capsys.readouterr().out == ""


def test_watch_polls_less_often_while_the_status_is_unchanged(
    waiting: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 12:
            waiting.end(Kind.CANCELLED)

    monkeypatch.setattr("slurmrl.cli.following.time.sleep", sleep)
    assert main(["status", "add/1", "--watch"]) == 0
    assert pauses[0] <= 1.0
    assert 20 <= max(pauses) <= 30


def test_ctrl_c_ends_watch(waiting: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    assert watch(monkeypatch, interrupt) == 130


# -- events ------------------------------------------------------------------------------------


def test_events_are_printed_from_all_writers(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun(root)
    run.event("master.1", "ready", step=0)
    run.event("agent.trainer.0.0", "failure", cause="died", reason="worker\x1b[2J\n 1", rank=1)
    assert main(["events", "add/1"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    clock = r"\d\d-\d\d \d\d:\d\d:\d\d\.\d"
    assert re.fullmatch(rf"{clock}  ready    step=0  \(master.1\)", first)
    assert re.match(rf"{clock}  failure  cause=died", second)
    assert second.endswith("cause=died  reason=worker [2J  1  rank=1  (agent.trainer.0.0)")
    assert main(["events", "add/1", "-n", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [second]
    assert main(["events", "add/1", "--json", "--kind", "ready"]) == 0
    assert printed(capsys)["step"] == 0
    assert main(["events", "add/1", "--kind", "commit"]) == 0
    assert (
        capsys.readouterr().err == "no event matches; the trial has events of kind failure, ready\n"
    )


@pytest.mark.parametrize("follow", [[], ["-f"]], ids=["once", "follow"])
def test_unknown_kind_of_event_is_rejected_with_the_allowed_kinds(
    root: Path, capsys: pytest.CaptureFixture[str], follow: list[str]
) -> None:
    run = FakeRun(root)
    assert main(["events", "add/1", "--kind", "redy", *follow]) == 2
    said = capsys.readouterr().err
    assert "--kind: no event has kind 'redy'; did you mean 'ready'? allowed: batch_host" in said
    assert "world_ready" in said
    run.paths.event_file("newer").write_text('{"time": 1.0, "kind": "redy"}\n')
    if not follow:
        assert main(["events", "add/1", "--kind", "redy"]) == 0
        assert "(newer)" in capsys.readouterr().out


def test_events_reports_a_trial_without_events(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun(root)
    assert main(["events", "add/1"]) == 0
    assert capsys.readouterr().err == "no events yet\n"
    run.paths.event_file("odd").write_text('{"time": 1e300, "kind": "x"}\n')
    assert main(["events", "add/1"]) == 0
    assert capsys.readouterr().out.split() == ["(invalid", "time)", "x", "(odd)"]


@pytest.mark.parametrize(
    ("since", "code"),
    [("1h", 0), ("2020-01-31 14:30", 0), ("0s", 0), ("2999-01-31", 0), ("soon", 2), ("3 weeks", 2)],
)
def test_events_since_accepts_ages_and_dates(
    root: Path, capsys: pytest.CaptureFixture[str], since: str, code: int
) -> None:
    FakeRun(root).event("master.1", "ready", step=0)
    assert main(["events", "add/1", "--since", since]) == code
    assert ("ready" in capsys.readouterr().out) is (since in ("1h", "2020-01-31 14:30"))


def test_commands_default_to_the_newest_trial(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default is the most recently submitted trial, regardless of its name. Without trials, a
    message says so.
    """
    assert main(["events"]) == 2
    assert "there are no trials in" in capsys.readouterr().err
    for name, submitted in (("10", 3), ("9", 5), ("11", 4)):
        run = FakeRun(root, trial=name)
        run.event(f"master.{name}", "ready", step=0)
        run.log("0.0.log", f"output of {name}\n")
        os.utime(run.paths.submissions, (submitted, submitted))
    assert main(["logs"]) == 0
    assert capsys.readouterr() == ("output of 9\n", "add/9, the newest trial\n")
    assert main(["events", "--json"]) == 0
    assert printed(capsys)["writer"] == "master.9"


def test_events_follow_ends_with_the_trial(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(root)
    run.event("master.1", "ready", step=0)

    def new_file() -> None:
        run.event("master.2", "ready", step=4)

    def half() -> None:
        with run.paths.event_file("master.2").open("a") as file:
            file.write('{"time": 1e12, "kind": "fini')

    def rest() -> None:
        with run.paths.event_file("master.2").open("a") as file:
            file.write('shed"}\n')
        run.end(Kind.CANCELLED)

    waits = iter([new_file, half, rest])
    monkeypatch.setattr("slurmrl.cli.following.time.sleep", lambda seconds: next(waits)())
    assert main(["events", "add/1", "-f", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["writer"], one["kind"]) for one in lines] == [
        ("master.1", "ready"),
        ("master.2", "ready"),
        ("master.2", "finished"),
    ]


# -- logs --------------------------------------------------------------------------------------


def test_lines_of_several_logs_have_prefixes(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun(root)
    run.log("0.0.log", "old\n")
    run.log("0.1.log", "a\nb")
    assert main(["logs", "add/1"]) == 0
    assert capsys.readouterr().out == "a\nb\n"
    run.log("1.0.log", "c\n")
    assert main(["logs", "add/1"]) == 0
    assert capsys.readouterr().out == "trainer/0 | a\ntrainer/0 | b\ntrainer/1 | c\n"
    assert main(["logs", "add/1", "--group", "trainer", "--task", "1"]) == 0
    assert capsys.readouterr().out == "c\n"


def test_logs_follow_prints_new_lines_once_and_ends_with_the_trial(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(root)
    happenings = [
        lambda: run.log("0.0.log", "first\nhal"),
        lambda: run.log("0.0.log", "first\nhalf\n"),
        lambda: run.log("0.1.log", "second attempt\nlast without end"),
        lambda: run.end(Kind.CANCELLED),
    ]
    waits = iter(happenings)
    monkeypatch.setattr("slurmrl.cli.following.time.sleep", lambda seconds: next(waits)())
    assert main(["logs", "add/1", "-f"]) == 0
    lines = ["first", "half", "second attempt", "last without end"]
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize("words", [("logs", "-f"), ("events", "-f"), ("status", "--watch")])
def test_logs_follow_survives_an_unreachable_directory(
    waiting: FakeRun,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, str],
) -> None:
    hidden: list[Path] = []
    listdir = calls.SystemCalls.listdir

    def listed(self: calls.SystemCalls, directory: Path) -> Iterable[str]:
        if directory in hidden:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(directory))
        return listdir(self, directory)

    def hide() -> None:
        hidden.append(waiting.paths.history)

    def show() -> None:
        hidden.clear()
        waiting.log("0.0.log", "the end\n")
        waiting.event("master.1", "finished", words="the end")
        waiting.end(Kind.CANCELLED, reason="the end")

    waits = iter([hide, lambda: None, show])
    monkeypatch.setattr(calls.SystemCalls, "listdir", listed)
    monkeypatch.setattr("slurmrl.cli.following.time.sleep", lambda seconds: next(waits)())
    assert main([words[0], "add/1", words[1]]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("cannot read the trial, trying again: ") == 1
    assert "the end" in captured.out


@pytest.mark.parametrize("words", [("logs", "-f"), ("events", "-f"), ("status", "--watch")])
def test_logs_follow_ends_if_the_trial_is_removed(
    waiting: FakeRun,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, str],
) -> None:
    waits = iter([lambda: shutil.rmtree(waiting.paths.run)])
    monkeypatch.setattr("slurmrl.cli.following.time.sleep", lambda seconds: next(waits)())
    assert main([words[0], "add/1", words[1]]) == 2
    assert "add/1" in capsys.readouterr().err


# -- submit, cancel, resume --------------------------------------------------------------------


def submit_it(tmp_path: Path, *more: str) -> int:
    config = write_config(tmp_path)
    return main(["submit", str(config), "--scheduler", "local", "--no-check", *more])


def test_submit_dry_run_writes_nothing(
    root: Path, tmp_path: Path, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler.problem = "must not be asked"
    assert submit_it(tmp_path, "--dry-run") == 0
    output = capsys.readouterr().out
    head, script = output.split("\n\n", 1)
    run = RunPaths.of(root, user_name(), "add", "1").run
    assert head.splitlines() == [
        "add/1 would be submitted to local:",
        "  algorithm       sft, 6 steps",
        "  job of trainer  1 host, 1 worker and 0 GPUs on each, 8 links in the queue",
        f"  directory       {run} (new)",
        "  written there   configuration, plan, a copy of the code, the batch scripts",
    ]
    assert script == "# trainer.sh\n#!/bin/bash\nlinks 8\n\n"
    assert submit_it(tmp_path, "--dry-run", "--json", "cluster.slurm.links=3") == 0
    shown = printed(capsys)
    assert shown["trial"] == "add/1"
    assert shown["plan"]["groups"][0]["links"] == 3
    assert shown["scripts"] == {"trainer": "#!/bin/bash\nlinks 3\n"}
    assert not root.exists()


def test_dry_run_shows_batch_script_without_its_shell_functions(
    root: Path,
    tmp_path: Path,
    scheduler: FakeScheduler,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def scripts(request: SubmissionRequest) -> dict[str, str]:
        return {"trainer": script(request, request.groups[0], "srun")}

    monkeypatch.setattr(scheduler, "scripts", scripts)
    assert submit_it(tmp_path, "--dry-run") == 0
    shown = capsys.readouterr().out.split("# trainer.sh\n")[1].rstrip().splitlines()
    assert submit_it(tmp_path, "--dry-run", "--json") == 0
    whole = printed(capsys)["scripts"]["trainer"].rstrip().splitlines()
    (note,) = [line for line in shown if line.startswith("# … ")]
    assert len(shown) - 1 + int(note.split()[2]) == len(whole)
    assert len(shown) < 40 < len(whole)


def test_checks_are_announced_on_a_terminal_before_they_run(
    root: Path,
    tmp_path: Path,
    scheduler: FakeScheduler,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []

    def check(self: proposal.Proposal, *limits: Any) -> list[Finding]:
        said.append(capsys.readouterr().err)
        return []

    monkeypatch.setattr(proposal.Proposal, "check", check)
    words = ["submit", str(write_config(tmp_path)), "--scheduler", "local", "--dry-run"]
    for on_terminal in (True, False):
        monkeypatch.setattr("sys.stderr.isatty", lambda shown=on_terminal: shown)
        assert main(words) == 0
    assert said[0].startswith("checking data, weights, tokenizer, reward, disk of add/1 (")
    assert said[1:] == [""]


def test_detached_submit_prints_the_next_commands(
    root: Path, tmp_path: Path, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit_it(tmp_path, "--detach") == 0
    output = capsys.readouterr().out
    assert output.startswith("add/1 submitted to local (trainer: 41)\n")
    assert "slurmrl status add/1 --watch\n" in output
    assert submit_it(tmp_path, "--detach", "--new", "--root", str(tmp_path / "other")) == 0
    assert f"slurmrl logs add/1 -f --root {tmp_path / 'other'}\n" in capsys.readouterr().out


def test_ctrl_c_during_submit_stops_the_run(
    root: Path,
    tmp_path: Path,
    scheduler: FakeScheduler,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the submission, the run exists. Ctrl-C stops it, because it must not continue without
    its user.
    """
    submit_jobs, stop = scheduler.submit, scheduler.interrupt

    def pressed(request: SubmissionRequest) -> dict[str, tuple[str, ...]]:
        signal.raise_signal(signal.SIGINT)
        scheduler.tasks = [task(0, JobState.RUNNING)]
        return submit_jobs(request)

    def stopped(jobs: JobIds) -> None:
        stop(jobs)
        scheduler.tasks = []
        FakeRun(root).end(Kind.CANCELLED, reason="interrupted")

    monkeypatch.setattr(scheduler, "submit", pressed)
    monkeypatch.setattr(scheduler, "interrupt", stopped)
    assert submit_it(tmp_path) == 130
    assert scheduler.done == ["interrupt"]
    assert "stopping at the next step" in capsys.readouterr().out


def test_submit_prints_json(
    root: Path, tmp_path: Path, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit_it(tmp_path, "--detach", "--json") == 0
    assert printed(capsys) == {
        "trial": "add/1",
        "run": str(RunPaths.of(root, user_name(), "add", "1").run),
        "scheduler": "local",
        "submission": 1,
        "jobs": {"trainer": "41"},
        "resumed_step": None,
        "notes": [],
        "checks": [],
    }


def test_submit_of_a_complete_trial_submits_nothing(
    root: Path, tmp_path: Path, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit_it(tmp_path, "--detach") == 0
    run = FakeRun(root)
    run.begin()
    run.end(Kind.FINISHED, step=6, reason="total_steps")
    capsys.readouterr()
    assert submit_it(tmp_path) == 0
    assert "slurmrl resume add/1 total_steps=N" in capsys.readouterr().out
    assert len(scheduler.requests) == 1


def test_submit_of_a_complete_offline_pass_submits_nothing(
    root: Path, tmp_path: Path, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    """The number of steps depends on the dataset, regardless of a limit."""
    passes = ("algorithm={name: evaluate, measure: likelihood, batch_size: 8}", "total_steps=9")
    assert submit_it(tmp_path, "--detach", *passes) == 0
    run = FakeRun(root)
    request = json.loads(run.paths.submission_request(1).read_text())
    assert request["total_steps"] is None
    run.begin()
    run.end(Kind.FINISHED, step=1, reason=END_OF_DATASET)
    capsys.readouterr()
    assert submit_it(tmp_path, *passes) == 0
    output = capsys.readouterr().out
    assert "add/1 is already complete" in output
    assert "total_steps" not in output


def test_cancelled_trial_is_resumed(
    root: Path, tmp_path: Path, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit_it(tmp_path, "--detach") == 0
    assert main(["cancel", "add/1"]) == 0
    assert "to continue it: slurmrl resume add/1\n" in capsys.readouterr().out
    assert main(["resume", "add/1", "--no-check", "total_steps=7", "--detach", "--json"]) == 0
    assert printed(capsys)["submission"] == 2
    run = FakeRun(root)
    run.begin()
    run.end(Kind.FINISHED, step=7, reason="total_steps")
    other = FakeRun(root, trial="2")
    assert main(["cancel", "add/2", "add/9"]) == 2
    assert other.history.read() == [], "nothing is cancelled if one of the names is wrong"
    capsys.readouterr()
    assert main(["cancel", "add/1", "add/2"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "add/1 has already ended: finished"
    assert second.startswith("add/2 is cancelled")


def test_rm_is_rejected_while_jobs_or_other_trials_need_the_files(
    waiting: FakeRun,
    root: Path,
    scheduler: FakeScheduler,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    user = FakeRun(root, "sub", "1")
    user.paths.config.write_text(f"actor: {{path: {waiting.paths.run}/export/step-00000001}}\n")
    assert main(["rm", "add/1", "sub/1", "--yes"]) == 2
    assert "still has jobs: 41_0 (PENDING); first: slurmrl cancel add/1" in capsys.readouterr().err
    scheduler.tasks = []
    assert main(["rm", "add/1", "--yes"]) == 2
    assert "sub/1 uses files of add/1" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert main(["rm", "add/1", "sub/1"]) == 130
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["rm", "add/1", "sub/1"]) == 2
    assert "no terminal to confirm: --yes removes without asking" in capsys.readouterr().err
    assert waiting.paths.run.is_dir()
    assert user.paths.run.is_dir()
    (root / user_name() / "add" / ".removed-7").mkdir()  # of a removal that was killed
    assert main(["rm", "add/1", "sub/1", "--yes"]) == 0
    assert list((root / user_name()).iterdir()) == []


def contents(root: Path) -> dict[Path, tuple[int, bytes]]:
    files = [path for path in root.rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_full_disk_is_reported_and_resume_submits_nothing(
    root: Path,
    tmp_path: Path,
    scheduler: FakeScheduler,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Links could not write a report to the full disk."""
    assert submit_it(tmp_path, "--detach") == 0
    scheduler.tasks = []
    capsys.readouterr()
    monkeypatch.setattr(calls, "free_bytes", lambda directory: 3 << 20)
    assert main(["status", "add/1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "is full: 3 MiB are left, so no link can have started; free some space, then" in shown
    assert main(["resume", "add/1", "--no-check", "--detach"]) == 3
    assert "is full: 3 MiB are free" in capsys.readouterr().err
    assert len(scheduler.requests) == 1


def test_resume_dry_run_changes_nothing(
    root: Path, tmp_path: Path, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit_it(tmp_path, "--detach") == 0
    run = FakeRun(root)
    run.begin()
    run.commit(4)
    run.end(Kind.CANCELLED)
    scheduler.tasks = [task(3, JobState.PENDING)]  # what is left of the trial stays, too
    before = contents(root)
    capsys.readouterr()
    assert main(["resume", "add/1", "--no-check", "cluster.slurm.links=3", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "  continues from  step 4\n" in output
    assert "  written there   the batch scripts\n" in output
    assert "#!/bin/bash\nlinks 3" in output
    assert main(["resume", "add/1", "--no-check", "actor.optimizer.lr=1", "--dry-run"]) == 2
    assert "add/1 exists with another configuration" in capsys.readouterr().err
    assert main(["resume", "add/1", "--no-check", "total_steps=7", "--dry-run", "--json"]) == 0
    shown = printed(capsys)
    assert (shown["trial"], shown["resumed_step"]) == ("add/1", 4)
    assert shown["scripts"] == {"trainer": "#!/bin/bash\nlinks 8\n"}
    assert contents(root) == before
    assert (len(scheduler.requests), scheduler.done) == (1, [])


def test_submit_dry_run_rejects_the_same_trials_as_submit(
    root: Path, tmp_path: Path, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dry run reports what submit would do with the existing trial, and changes nothing."""
    assert submit_it(tmp_path, "--detach") == 0
    scheduler.tasks = [task(0, JobState.RUNNING)]
    assert submit_it(tmp_path, "--dry-run") == 2
    assert "add/1 is live (job 41_0, RUNNING)" in capsys.readouterr().err
    assert submit_it(tmp_path, "--dry-run", "--new") == 0
    assert "add/2 would be submitted to" in capsys.readouterr().out
    run = FakeRun(root)
    run.begin()
    run.commit(4)
    run.end(Kind.CANCELLED)
    scheduler.tasks = [task(3, JobState.PENDING)]
    before = contents(root)
    assert submit_it(tmp_path, "--dry-run", "actor.optimizer.lr=1") == 2
    shown = capsys.readouterr()
    assert "add/1 exists with another configuration: submit it with --new, or undo:" in shown.err
    assert shown.out == ""
    assert submit_it(tmp_path, "--dry-run", "cluster.slurm.links=3") == 0
    output = capsys.readouterr().out
    assert "  continues from  step 4\n" in output
    assert "  cancelled       its jobs that are still queued: 41" in output
    assert submit_it(tmp_path, "--dry-run", "--json") == 0
    assert printed(capsys)["resumed_step"] == 4
    assert contents(root) == before
    assert (len(scheduler.requests), scheduler.done) == (1, [])


def test_plan_reports_a_trial_with_another_configuration(
    root: Path, tmp_path: Path, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan lists it under problems to fix before submission. A plan of the same trial has no
    problem.
    """
    config = str(write_config(tmp_path))
    assert submit_it(tmp_path, "--detach") == 0
    run = FakeRun(root)
    run.begin()
    arguments = ["plan", config, "--scheduler", "local", "--json"]
    capsys.readouterr()
    assert main([*arguments, "seed=9"]) == 0
    assert printed(capsys)["missing"] == [], "it has no commit, and would begin with seed 9"
    run.commit(4)
    assert main([*arguments, "total_steps=9"]) == 0
    assert printed(capsys)["missing"] == []
    assert main([*arguments, "seed=9"]) == 2
    [problem] = printed(capsys)["missing"]
    assert problem.startswith(
        "add/1 exists with another configuration: submit it with --new, or undo:"
    )
    assert "seed: 1 in the trial, 9 now" in problem


def test_resume_dry_run_rejects_the_same_trials_as_resume(
    root: Path, tmp_path: Path, scheduler: FakeScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit_it(tmp_path, "--detach") == 0
    scheduler.tasks = [task(0, JobState.RUNNING)]
    assert main(["resume", "add/1", "--no-check", "--dry-run"]) == 2
    assert "is live" in capsys.readouterr().err
    scheduler.tasks = []
    run = FakeRun(root)
    run.begin()
    run.end(Kind.FINISHED, step=6, reason="total_steps")
    assert main(["resume", "add/1", "--no-check", "--dry-run"]) == 0
    assert capsys.readouterr().out == "add/1 is already complete; nothing would be submitted\n"
