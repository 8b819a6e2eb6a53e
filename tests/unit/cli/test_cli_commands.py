"""Commands on run directories that no process lives in."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable
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
from tests.unit.cli.conftest import Command, Output


class Desk(Command):
    """A user's folder with trials in ``runs``, and a scheduler with prepared answers."""

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        super().__init__(capsys)
        self.folder, self.root = folder, folder / "runs"
        self.scheduler = FakeScheduler()
        self._patch = patch
        patch.setenv("SLURMRL_ROOT", str(self.root))
        patch.chdir(folder)
        for module in (trial_jobs, proposal, submitting):
            patch.setattr(module, "make", lambda kind: self.scheduler)
        patch.setattr("slurmrl.scheduler.make", lambda kind: self.scheduler)

    def at_pauses(self, *happenings: Callable[[], Any]) -> None:
        """At each pause of a command that follows a trial, the next thing happens."""
        waits = iter(happenings)
        self._patch.setattr("slurmrl.cli.following.time.sleep", lambda seconds: next(waits)())

    def submit(self, *more: str, code: int = 0) -> Output:
        config = write_config(self.folder)
        return self("submit", str(config), "--scheduler", "local", "--no-check", *more, code=code)

    def submitted(self) -> FakeRun:
        self.submit("--detach")
        return FakeRun(self.root)

    def interrupted(self) -> FakeRun:
        """Submit a trial that is cancelled after a commit, with a job that is still queued."""
        run = self.submitted()
        run.begin()
        run.commit(4)
        run.end(Kind.CANCELLED)
        self.scheduler.tasks = [task(3, JobState.PENDING)]
        return run

    def waiting(self) -> FakeRun:
        """Make a trial whose first job is queued."""
        run = FakeRun(self.root)
        run.submission()
        self.scheduler.jobs[run.paths.run, 1] = {"trainer": ("41",)}
        words = "others come first"
        self.scheduler.tasks = [task(0, JobState.PENDING, reason="Priority", words=words)]
        return run

    def contents(self) -> dict[Path, tuple[int, bytes]]:
        files = [path for path in self.root.rglob("*") if path.is_file()]
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.fixture
def desk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Desk:
    return Desk(tmp_path, monkeypatch, capsys)


def nothing() -> None:
    """Nothing happens."""


# -- status ------------------------------------------------------------------------------------


def test_status_lists_all_trials_or_the_named_ones(desk: Desk) -> None:
    for experiment, trial in (("add", "1"), ("add", "2"), ("sub", "1")):
        FakeRun(desk.root, experiment, trial).end(Kind.CANCELLED, reason="cancelled by me")
    for words, trials in (
        ([], ["add/1", "add/2", "sub/1"]),
        (["add"], ["add/1", "add/2"]),
        (["sub/1", "add/1", "sub/1"], ["sub/1", "add/1"]),
    ):
        assert [one["trial"] for one in desk.json("status", *words)] == trials
    assert desk.json("status", "add/2")["state"] == "CANCELLED"


def test_status_options_filter_and_sort_the_list(desk: Desk) -> None:
    ends = {"1": Kind.FAILED, "2": Kind.FINISHED, "3": Kind.FAILED, "4": None}
    for trial, kind in ends.items():
        run = FakeRun(desk.root, trial=trial)
        run.submission(time=1000.0 * (5 - int(trial)) if trial != "3" else 9000.0)
        if kind is not None:
            run.begin()
            run.end(kind, reason="x", step=1)
    for order, trials in {"name": "1234", "age": "3124", "state": "4132"}.items():
        found = desk.json("status", "--sort", order)
        assert [one["trial"] for one in found] == [f"add/{name}" for name in trials]
    shown = desk("status", "--state", "failed", "--state", "INTERRUPTED").lines
    assert [line.split()[0] for line in shown] == ["TRIAL", "add/1", "add/3", "add/4"]
    assert desk("status", "--state", "pending").out == f"no PENDING trials in {desk.root}\n"


def test_root_option_overrides_the_environment(desk: Desk) -> None:
    FakeRun(desk.folder / "elsewhere", "there")
    assert [one["trial"] for one in desk.json("status", "--root", "elsewhere")] == ["there/1"]


def test_watch_ends_without_jobs(desk: Desk) -> None:
    """The watch ends because nothing can change without jobs. If the scheduler does not answer,
    there may be jobs.
    """
    desk.waiting()

    def silent() -> None:
        desk.scheduler.problem = "squeue did not answer"

    def gone() -> None:
        desk.scheduler.problem = None
        desk.scheduler.tasks = []

    desk.at_pauses(silent, nothing, nothing, gone, nothing)
    assert "INTERRUPTED" in desk("status", "add/1", "--watch").lines[-1]


def test_watch_prints_only_changes_without_a_terminal(desk: Desk) -> None:
    run = desk.waiting()
    desk.at_pauses(*[nothing] * 5, lambda: run.end(Kind.CANCELLED, reason="cancelled by me"))
    lines = desk("status", "add/1", "--watch", "--json").lines
    assert [json.loads(line)["state"] for line in lines] == ["PENDING", "CANCELLED"]


def test_watch_prints_changes_to_a_pipe_and_exits_with_1_on_failure(desk: Desk) -> None:
    run = desk.waiting()
    FakeRun(desk.root, trial="2").end(Kind.CANCELLED, reason="cancelled by me")
    desk.at_pauses(nothing, lambda: run.end(Kind.FAILED, reason="NaN"))
    words = ["add/1", "--watch", "add/2", "add", "--exit-status"]
    first, second, third = desk("status", *words, code=1).lines
    clock = r"\d\d:\d\d:\d\d"
    assert re.match(rf"{clock}  add/1  PENDING  step 0/60  pending", first)
    assert re.match(rf"{clock}  add/2  CANCELLED  step 0/\?  cancelled by me; ", second)
    assert re.fullmatch(rf"{clock}  add/1  FAILED  step 0/60  gave up: NaN", third)
    desk("status", "add/2", "--exit-status")


def test_errors_of_json_commands_are_json(desk: Desk) -> None:
    FakeRun(desk.root)
    for word in ("add/9", "--wach"):
        output = desk("status", word, "--json", code=2)
        told = json.loads(output.out)
        assert told["exit_code"] == 2
        assert told["error"] in output.err
        assert "did you mean" in output.err.lower()
    assert desk("status", "add/9", code=2).out == ""


def test_watch_polls_less_often_while_the_status_is_unchanged(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, pauses = desk.waiting(), list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 12:
            run.end(Kind.CANCELLED)

    monkeypatch.setattr("slurmrl.cli.following.time.sleep", sleep)
    desk("status", "add/1", "--watch")
    assert pauses[0] <= 1.0
    assert 20 <= max(pauses) <= 30


def test_ctrl_c_ends_watch(desk: Desk) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    desk.waiting()
    desk.at_pauses(interrupt)
    desk("status", "add/1", "--watch", code=130)


# -- events ------------------------------------------------------------------------------------


def test_events_are_printed_from_all_writers(desk: Desk) -> None:
    run = FakeRun(desk.root)
    run.event("master.1", "ready", step=0)
    run.event("agent.trainer.0.0", "failure", cause="died", reason="worker\x1b[2J\n 1", rank=1)
    first, second = desk("events", "add/1").lines
    clock = r"\d\d-\d\d \d\d:\d\d:\d\d\.\d"
    assert re.fullmatch(rf"{clock}  ready    step=0  \(master.1\)", first)
    assert re.match(rf"{clock}  failure  cause=died", second)
    assert second.endswith("cause=died  reason=worker [2J  1  rank=1  (agent.trainer.0.0)")
    assert desk("events", "add/1", "-n", "1").lines == [second]
    assert desk.json("events", "add/1", "--kind", "ready")["step"] == 0
    told = desk("events", "add/1", "--kind", "commit").err
    assert told == "no event matches; the trial has events of kind failure, ready\n"


@pytest.mark.parametrize("follow", [[], ["-f"]], ids=["once", "follow"])
def test_unknown_kind_of_event_is_rejected_with_the_allowed_kinds(
    desk: Desk, follow: list[str]
) -> None:
    run = FakeRun(desk.root)
    said = desk.rejected("events", "add/1", "--kind", "redy", *follow)
    assert "--kind: no event has kind 'redy'; did you mean 'ready'? allowed: batch_host" in said
    assert "world_ready" in said
    run.paths.event_file("newer").write_text('{"time": 1.0, "kind": "redy"}\n')
    if not follow:
        assert "(newer)" in desk("events", "add/1", "--kind", "redy").out


def test_events_reports_a_trial_without_events(desk: Desk) -> None:
    run = FakeRun(desk.root)
    assert desk("events", "add/1").err == "no events yet\n"
    run.paths.event_file("odd").write_text('{"time": 1e300, "kind": "x"}\n')
    assert desk("events", "add/1").out.split() == ["(invalid", "time)", "x", "(odd)"]


@pytest.mark.parametrize(
    ("since", "code"),
    [
        *(("1h", 0), ("2020-01-31 14:30", 0), ("2020-01-31 9:05:30", 0), ("0:00:00", 0)),
        *(("0s", 0), ("2999-01-31", 0), ("soon", 2), ("3 weeks", 2)),
    ],
)
def test_events_since_accepts_ages_and_dates(desk: Desk, since: str, code: int) -> None:
    FakeRun(desk.root).event("master.1", "ready", step=0)
    shown = desk("events", "add/1", "--since", since, code=code).out
    assert ("ready" in shown) is (since == "1h" or ":" in since)


def test_commands_default_to_the_newest_trial(desk: Desk) -> None:
    """The default is the most recently submitted trial, regardless of its name."""
    assert "there are no trials in" in desk.rejected("events")
    for name, submitted in (("10", 3), ("9", 5), ("11", 4)):
        run = FakeRun(desk.root, trial=name)
        run.event(f"master.{name}", "ready", step=0)
        run.log("0.0.log", f"output of {name}\n")
        os.utime(run.paths.submissions, (submitted, submitted))
    assert desk("logs")[1:] == ("output of 9\n", "add/9, the newest trial\n")
    assert desk.json("events")["writer"] == "master.9"


def test_events_follow_ends_with_the_trial(desk: Desk) -> None:
    run = FakeRun(desk.root)
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

    desk.at_pauses(new_file, half, rest)
    lines = [json.loads(line) for line in desk("events", "add/1", "-f", "--json").lines]
    assert [(one["writer"], one["kind"]) for one in lines] == [
        ("master.1", "ready"),
        ("master.2", "ready"),
        ("master.2", "finished"),
    ]


# -- logs --------------------------------------------------------------------------------------


def test_lines_of_several_logs_have_prefixes(desk: Desk) -> None:
    run = FakeRun(desk.root)
    run.log("0.0.log", "old\n")
    run.log("0.1.log", "a\nb")
    assert desk("logs", "add/1").out == "a\nb\n"
    run.log("1.0.log", "c\n")
    assert desk("logs", "add/1").out == "trainer/0 | a\ntrainer/0 | b\ntrainer/1 | c\n"
    assert desk("logs", "add/1", "--group", "trainer", "--task", "1").out == "c\n"


def test_logs_follow_prints_new_lines_once_and_ends_with_the_trial(desk: Desk) -> None:
    run = FakeRun(desk.root)
    desk.at_pauses(
        lambda: run.log("0.0.log", "first\nhal"),
        lambda: run.log("0.0.log", "first\nhalf\n"),
        lambda: run.log("0.1.log", "second attempt\nlast without end"),
        lambda: run.end(Kind.CANCELLED),
    )
    lines = ["first", "half", "second attempt", "last without end"]
    assert desk("logs", "add/1", "-f").lines == lines


FOLLOWING = pytest.mark.parametrize(
    ("name", "option"), [("logs", "-f"), ("events", "-f"), ("status", "--watch")]
)


@FOLLOWING
def test_logs_follow_survives_an_unreachable_directory(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, name: str, option: str
) -> None:
    run, hidden = desk.waiting(), list[Path]()
    listdir = calls.SystemCalls.listdir

    def listed(self: calls.SystemCalls, directory: Path) -> Iterable[str]:
        if directory in hidden:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(directory))
        return listdir(self, directory)

    def show() -> None:
        hidden.clear()
        run.log("0.0.log", "the end\n")
        run.event("master.1", "finished", words="the end")
        run.end(Kind.CANCELLED, reason="the end")

    monkeypatch.setattr(calls.SystemCalls, "listdir", listed)
    desk.at_pauses(lambda: hidden.append(run.paths.history), nothing, show)
    output = desk(name, "add/1", option)
    assert output.err.count("cannot read the trial, trying again: ") == 1
    assert "the end" in output.out


@FOLLOWING
def test_logs_follow_ends_if_the_trial_is_removed(desk: Desk, name: str, option: str) -> None:
    run = desk.waiting()
    desk.at_pauses(lambda: shutil.rmtree(run.paths.run))
    assert "add/1" in desk.rejected(name, "add/1", option)


# -- submit, cancel, resume --------------------------------------------------------------------


def test_submit_dry_run_writes_nothing(desk: Desk) -> None:
    desk.scheduler.problem = "must not be asked"
    head, script = desk.submit("--dry-run").out.split("\n\n", 1)
    run = RunPaths.of(desk.root, user_name(), "add", "1").run
    assert head.splitlines() == [
        "add/1 would be submitted to local:",
        "  algorithm       sft, 6 steps",
        "  job of trainer  1 host, 1 worker and 0 GPUs on each, 8 links in the queue",
        f"  directory       {run} (new)",
        "  written there   configuration, plan, a copy of the code, the batch scripts",
    ]
    assert script == "# trainer.sh\n#!/bin/bash\nlinks 8\n\n"
    shown = json.loads(desk.submit("--dry-run", "--json", "cluster.slurm.links=3").out)
    assert shown["trial"] == "add/1"
    assert shown["plan"]["groups"][0]["links"] == 3
    assert shown["scripts"] == {"trainer": "#!/bin/bash\nlinks 3\n"}
    assert not desk.root.exists()


def test_dry_run_shows_batch_script_without_its_shell_functions(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scripts(request: SubmissionRequest) -> dict[str, str]:
        return {"trainer": script(request, request.groups[0], "srun")}

    monkeypatch.setattr(desk.scheduler, "scripts", scripts)
    shown = desk.submit("--dry-run").out.split("# trainer.sh\n")[1].rstrip().splitlines()
    whole = json.loads(desk.submit("--dry-run", "--json").out)["scripts"]["trainer"]
    (note,) = [line for line in shown if line.startswith("# … ")]
    count = len(whole.rstrip().splitlines())
    assert len(shown) - 1 + int(note.split()[2]) == count
    assert len(shown) < 40 < count


def test_checks_are_announced_on_a_terminal_before_they_run(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def check(self: proposal.Proposal, *limits: Any) -> list[Finding]:
        said.append(capsys.readouterr().err)
        return []

    monkeypatch.setattr(proposal.Proposal, "check", check)
    words = ["submit", str(write_config(desk.folder)), "--scheduler", "local", "--dry-run"]
    for on_terminal in (True, False):
        monkeypatch.setattr("sys.stderr.isatty", lambda shown=on_terminal: shown)
        assert main(words) == 0
    assert said[0].startswith("checking data, weights, tokenizer, reward, disk of add/1 (")
    assert said[1:] == [""]


def test_detached_submit_prints_the_next_commands(desk: Desk) -> None:
    output = desk.submit("--detach").out
    assert output.startswith("add/1 submitted to local (trainer: 41)\n")
    assert "slurmrl status add/1 --watch\n" in output
    other = str(desk.folder / "other")
    output = desk.submit("--detach", "--new", "--root", other).out
    assert f"slurmrl logs add/1 -f --root {other}\n" in output


def test_ctrl_c_during_submit_stops_the_run(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the submission, the run exists. It must not continue without its user."""
    scheduler = desk.scheduler
    submit_jobs, stop = scheduler.submit, scheduler.interrupt

    def pressed(request: SubmissionRequest) -> dict[str, tuple[str, ...]]:
        signal.raise_signal(signal.SIGINT)
        scheduler.tasks = [task(0, JobState.RUNNING)]
        return submit_jobs(request)

    def stopped(jobs: JobIds) -> None:
        stop(jobs)
        scheduler.tasks = []
        FakeRun(desk.root).end(Kind.CANCELLED, reason="interrupted")

    monkeypatch.setattr(scheduler, "submit", pressed)
    monkeypatch.setattr(scheduler, "interrupt", stopped)
    assert "stopping at the next step" in desk.submit(code=130).out
    assert scheduler.done == ["interrupt"]


def test_submit_prints_json(desk: Desk) -> None:
    assert json.loads(desk.submit("--detach", "--json").out) == {
        "trial": "add/1",
        "run": str(RunPaths.of(desk.root, user_name(), "add", "1").run),
        "scheduler": "local",
        "submission": 1,
        "jobs": {"trainer": "41"},
        "resumed_step": None,
        "notes": [],
        "checks": [],
    }


def test_submit_of_a_complete_offline_pass_submits_nothing(desk: Desk) -> None:
    """The number of steps depends on the dataset, regardless of a limit."""
    passes = ("algorithm={name: evaluate, measure: likelihood, batch_size: 8}", "total_steps=9")
    desk.submit("--detach", *passes)
    run = FakeRun(desk.root)
    request = json.loads(run.paths.submission_request(1).read_text())
    assert request["total_steps"] is None
    run.begin()
    run.end(Kind.FINISHED, step=1, reason=END_OF_DATASET)
    output = desk.submit(*passes).out
    assert "add/1 is already complete" in output
    assert "total_steps" not in output


def test_cancelled_trial_is_resumed(desk: Desk) -> None:
    run = desk.submitted()
    assert "to continue it: slurmrl resume add/1\n" in desk("cancel", "add/1").out
    other = desk.rejected("resume", "add/1", "--no-check", f"root={desk.root}/b")
    assert f"root: a resumed trial stays in {run.paths.run}; --root names" in other
    same = f"root={desk.root}/../{desk.root.name}"
    resume = ("resume", "add/1", "--no-check", same, "total_steps=7", "--detach")
    assert desk.json(*resume)["submission"] == 2
    run.begin()
    run.end(Kind.FINISHED, step=7, reason="total_steps")
    assert "slurmrl resume add/1 total_steps=N" in desk.submit().out
    assert len(desk.scheduler.requests) == 2, "it is complete"
    other = FakeRun(desk.root, trial="2")
    desk.rejected("cancel", "add/2", "add/9")
    assert other.history.read() == [], "nothing is cancelled if one of the names is wrong"
    first, second = desk("cancel", "add/1", "add/2").lines
    assert first == "add/1 has already ended: finished"
    assert second.startswith("add/2 is cancelled")


def test_rm_is_rejected_while_jobs_or_other_trials_need_the_files(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, user = desk.waiting(), FakeRun(desk.root, "sub", "1")
    user.paths.config.write_text(f"actor: {{path: {run.paths.run}/export/step-00000001}}\n")
    told = desk.rejected("rm", "add/1", "sub/1", "--yes")
    assert "still has jobs: 41_0 (PENDING); first: slurmrl cancel add/1" in told
    desk.scheduler.tasks = []
    assert "sub/1 uses files of add/1" in desk.rejected("rm", "add/1", "--yes")
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    desk("rm", "add/1", "sub/1", code=130)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    told = desk.rejected("rm", "add/1", "sub/1")
    assert "no terminal to confirm: --yes removes without asking" in told
    run.submission(2, host="login2", pid=7, time=time.time())
    told = desk.rejected("rm", "add/1", "sub/1", "--yes")
    assert "add/1 is being submitted by another process" in told
    run.submission(2)
    assert run.paths.run.is_dir()
    assert user.paths.run.is_dir()
    (desk.root / user_name() / "add" / ".removed-7").mkdir()  # of a removal that was killed
    desk("rm", "add/1", "sub/1", "--yes")
    assert list((desk.root / user_name()).iterdir()) == []


def test_full_disk_is_reported_and_resume_submits_nothing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links could not write a report to the full disk."""
    desk.submitted()
    desk.scheduler.tasks = []
    monkeypatch.setattr(calls, "free_bytes", lambda directory: 3 << 20)
    shown = " ".join(desk("status", "add/1").out.split())
    assert "is full: 3 MiB are left, so no link can have started; free some space, then" in shown
    told = desk("resume", "add/1", "--no-check", "--detach", code=3).err
    assert "is full: 3 MiB are free" in told
    assert len(desk.scheduler.requests) == 1


def test_resume_dry_run_changes_nothing(desk: Desk) -> None:
    desk.interrupted()
    before, resume = desk.contents(), ("resume", "add/1", "--no-check", "--dry-run")
    output = desk(*resume, "cluster.slurm.links=3").out
    assert "  continues from  step 4\n" in output
    assert "  written there   the batch scripts\n" in output
    assert "#!/bin/bash\nlinks 3" in output
    told = desk.rejected(*resume, "actor.optimizer.lr=1")
    assert "add/1 exists with another configuration" in told
    shown = desk.json(*resume, "total_steps=7")
    assert (shown["trial"], shown["resumed_step"]) == ("add/1", 4)
    assert shown["scripts"] == {"trainer": "#!/bin/bash\nlinks 8\n"}
    assert desk.contents() == before
    assert (len(desk.scheduler.requests), desk.scheduler.done) == (1, [])


def test_submit_dry_run_rejects_a_live_trial(desk: Desk) -> None:
    desk.submitted()
    desk.scheduler.tasks = [task(0, JobState.RUNNING)]
    assert "add/1 is live (job 41_0, RUNNING)" in desk.submit("--dry-run", code=2).err
    assert "add/2 would be submitted to" in desk.submit("--dry-run", "--new").out


def test_submit_dry_run_changes_nothing_in_an_existing_trial(desk: Desk) -> None:
    desk.interrupted()
    before = desk.contents()
    shown = desk.submit("--dry-run", "actor.optimizer.lr=1", code=2)
    assert "add/1 exists with another configuration: submit it with --new, or undo:" in shown.err
    assert shown.out == ""
    output = desk.submit("--dry-run", "cluster.slurm.links=3").out
    assert "  continues from  step 4\n" in output
    assert "  cancelled       its jobs that are still queued: 41" in output
    assert json.loads(desk.submit("--dry-run", "--json").out)["resumed_step"] == 4
    assert desk.contents() == before
    assert (len(desk.scheduler.requests), desk.scheduler.done) == (1, [])


def test_plan_reports_a_trial_with_another_configuration(desk: Desk) -> None:
    """The plan lists it under problems to fix before submission."""
    run = desk.submitted()
    run.begin()
    plan = ("plan", str(desk.folder / "sft.yaml"), "--scheduler", "local")
    assert desk.json(*plan, "seed=9")["missing"] == [], "it has no commit: seed 9 is possible"
    run.commit(4)
    assert desk.json(*plan, "total_steps=9")["missing"] == []
    [problem] = desk.json(*plan, "seed=9", code=2)["missing"]
    known = "add/1 exists with another configuration: submit it with --new, or undo:"
    assert problem.startswith(known)
    assert "seed: 1 in the trial, 9 now" in problem


def test_resume_dry_run_rejects_the_same_trials_as_resume(desk: Desk) -> None:
    run = desk.submitted()
    desk.scheduler.tasks = [task(0, JobState.RUNNING)]
    assert "is live" in desk.rejected("resume", "add/1", "--no-check", "--dry-run")
    desk.scheduler.tasks = []
    run.begin()
    run.end(Kind.FINISHED, step=6, reason="total_steps")
    output = desk("resume", "add/1", "--no-check", "--dry-run").out
    assert output == "add/1 is already complete; nothing would be submitted\n"
