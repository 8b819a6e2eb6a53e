from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.schema import Logging
from slurmrl.name_resolve.store import encode
from slurmrl.run import keys
from slurmrl.run.history.slots import Kind
from slurmrl.run.reports import Failure, failure_words
from slurmrl.scheduler.base import JobState, TaskState
from slurmrl.watch.sinks import MetricsRecorder
from slurmrl.watch.snapshot import DETAILED, read
from slurmrl.watch.status import assemble
from tests.fake_runs import FakeRun, task

WORKER = {"host": "n1", "rank": 3, "call": "train_step", "step": 4}


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    run = FakeRun(tmp_path)
    run.submission()
    return run


def rows(run: FakeRun, *tasks: TaskState, alive: bool = False) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = assemble(read(run.paths, DETAILED), tasks, alive=alive)[
        "incarnations"
    ]
    return found


def start(run: FakeRun, job: str = "7.0.0", number: int = 0, job_id: str = "41_0") -> int:
    """A job of two hosts starts and its master begins."""
    run.attempt(job_id, number=number, job=job)
    return run.begin(job=job, link=number)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (
            {"cause": "exception", "exception": "ValueError: x\nmore", **WORKER},
            "rank 3 on n1: ValueError: x, train_step of step 4",
        ),
        ({"cause": "died", "exit_code": -9, **WORKER}, "rank 3 on n1 died: SIGKILL"),
        ({"cause": "died", "exit_code": 7, "rank": 3}, "rank 3 died: exited with code 7"),
        (
            {"cause": "died", "reason": "rank 3 on n1 was ended by SIGKILL", **WORKER},
            "rank 3 on n1 died: rank 3 on n1 was ended by SIGKILL",
        ),
        ({"cause": "oom", **WORKER}, "rank 3 on n1 was killed: out of memory"),
        ({"cause": "hung", **WORKER}, "rank 3 on n1 hung, train_step of step 4"),
        (
            {"cause": "hung", "silent_s": 60.0, "reason": "what was seen", **WORKER},
            "rank 3 on n1 hung: no heartbeat for 60 s, train_step of step 4",
        ),
        (
            {"cause": "hung", "reason": "rank 3 sent no heartbeat for 60 s", **WORKER},
            "rank 3 on n1 hung: rank 3 sent no heartbeat for 60 s, train_step of step 4",
        ),
        ({"cause": "hung", "host": "n0"}, "a process on n0 hung"),
        ({"cause": "deadline", "reason": "waited 600 s"}, "too slow: waited 600 s"),
        ({"cause": "lost_host", "host": "n2"}, "host n2 lost"),
        (
            {
                "cause": "gpu_fault",
                "rank": 3,
                "host": "n2",
                "gpu": "GPU 1 (NVIDIA H100, GPU-1f)",
                "exception": "AcceleratorError: CUDA error: uncorrectable ECC error encountered\nX",
            },
            "rank 3 on n2: GPU 1 (NVIDIA H100, GPU-1f) failed: AcceleratorError: CUDA error: "
            "uncorrectable ECC error encountered",
        ),
        ({"cause": "master", "reason": "master: KeyError: 1"}, "master: KeyError: 1"),
        (
            {"cause": "environment", "reason": "no space", "host": "n1"},
            "cannot continue on n1: no space",
        ),
        ({"cause": "something new", "reason": "", "host": "n1"}, "something new"),
    ],
)
def test_failure_is_described_in_words(failure: dict[str, Any], words: str) -> None:
    """Exit codes and times come from fields. If an older version wrote no fields, the line repeats
    the reason without interpretation.
    """
    assert failure_words(Failure(**failure)) == words


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        ({"exception": "ValueError", "rank": 1, "call": "loss", "step": 1}, "exception"),
        ({"reason": "rank 1 was ended by SIGKILL", "host": "n0"}, "unknown"),
    ],
)
def test_failure_of_an_older_version_has_no_cause(
    run: FakeRun, failure: dict[str, Any], cause: str
) -> None:
    """The line then shows what they report."""
    run.name(keys.failure(start(run)), **failure)
    row = rows(run)[0]
    assert row["cause"] == cause
    assert (failure.get("exception") or failure["reason"]) in row["how"]


def test_fields_of_a_newer_version_are_ignored(run: FakeRun) -> None:
    run.name(keys.failure(start(run)), cause="died", exit_code=-9, weather="rain", **WORKER)
    assert rows(run)[0]["how"] == "rank 3 on n1 died: SIGKILL"


@pytest.mark.parametrize("field", [{"exit_code": "SIGKILL"}, {"rank": -1}, {"silent_s": [60]}])
def test_failure_with_a_field_of_the_wrong_type_is_damaged(
    run: FakeRun, field: dict[str, Any]
) -> None:
    run.name(keys.failure(start(run)), **{"cause": "died", **WORKER, **field})
    assert rows(run)[0]["how"].endswith("is damaged; the trial continues without it")


@pytest.mark.parametrize(
    ("warned", "stopped", "cause", "how"),
    [
        ("time_limit", True, "time_limit", "time limit, handed over at step 12"),
        ("preemption", True, "preemption", "preempted or killed (SIGTERM), handed over at step 12"),
        (
            "preemption",
            False,
            "preemption",
            "preempted or killed (SIGTERM), before it could commit",
        ),
        ("interrupt", True, "interrupt", "interrupted (SIGTERM), handed over at step 12"),
        ("unknown", True, "unknown", "warned of its end (SIGTERM), handed over at step 12"),
    ],
)
def test_warning_is_described_in_words(
    run: FakeRun, warned: str, stopped: bool, cause: str, how: str
) -> None:
    number = start(run)
    run.name(keys.warned(number), signal="SIGTERM", cause=warned, time_left_s=None)
    if stopped:
        run.event(f"master.{number}", "stopped", step=12)
    (row,) = rows(run)
    assert (row["cause"], row["how"]) == (cause, how)


def test_programming_error_takes_precedence_over_a_later_warning(run: FakeRun) -> None:
    number = start(run)
    run.name(keys.warned(number), signal="SIGTERM", cause="preemption")
    run.name(keys.failure(number), cause="exception", exception="ValueError: x", **WORKER)
    assert rows(run)[0]["cause"] == "exception"


def test_death_after_a_warning_is_reported_as_preemption(run: FakeRun) -> None:
    number = start(run)
    run.name(keys.warned(number), signal="SIGTERM", cause="preemption")
    run.name(keys.failure(number), cause="died", reason="SIGTERM", **WORKER)
    assert rows(run)[0]["cause"] == "preemption"


@pytest.mark.parametrize(
    ("state", "more", "cause"),
    [
        (JobState.PREEMPTED, {}, "preemption"),
        (JobState.COMPLETED, {}, "preemption"),
        (JobState.FAILED, {}, "preemption"),
        (JobState.FAILED, {"signal": 9}, "killed"),
        (JobState.CANCELLED, {}, "interrupt"),
        (JobState.RUNNING, {}, "preemption"),
        (JobState.RUNNING, {"ending": JobState.FAILED, "signal": 9}, "killed"),
        (JobState.RUNNING, {"ending": JobState.FAILED, "exit_code": 1}, "preemption"),
        (JobState.UNKNOWN, {}, "preemption"),
    ],
)
def test_scheduler_state_decides_who_sent_a_signal(
    run: FakeRun, state: JobState, more: dict[str, Any], cause: str
) -> None:
    number = start(run)
    run.name(keys.warned(number), signal="SIGTERM", cause="preemption")
    start(run, "8.0.0", 1, "41_1")
    first, _ = rows(run, task(0, state, words="ended", **more))
    assert first["cause"] == cause


@pytest.mark.parametrize(
    ("next_job", "tasks", "words"),
    [
        ("7.1.0", [], "preempted"),
        ("8.0.0", [task(0, JobState.PREEMPTED)], "preempted"),
        ("8.0.0", [task(0, JobState.PENDING, restarts=1)], "preempted"),
        ("8.0.0", [], "preempted or killed"),
        ("7.0.1", [], "preempted or killed"),
        ("", [], "preempted or killed"),
    ],
)
def test_end_is_preemption_only_with_evidence_from_the_scheduler(
    run: FakeRun, next_job: str, tasks: list[TaskState], words: str
) -> None:
    """The scheduler is not asked about ended trials: the next start of the job is left."""
    run.name(keys.warned(start(run)), signal="SIGTERM", cause="preemption")
    if next_job:
        start(run, next_job, 1, "41_0" if next_job.startswith("7") else "41_1")
    assert rows(run, *tasks)[0]["how"] == f"{words} (SIGTERM), before it could commit"


def test_end_of_a_requeued_job_comes_from_its_last_start(run: FakeRun) -> None:
    for restarts in range(2):
        number = start(run, f"7.{restarts}.0", restarts)
        run.name(keys.warned(number), signal="SIGTERM", cause="preemption")
    ended = task(0, JobState.FAILED, words="was ended by signal 9", signal=9, restarts=1)
    assert [row["cause"] for row in rows(run, ended)] == ["preemption", "killed"]


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        (JobState.TIMEOUT, "time_limit"),
        (JobState.PREEMPTED, "preemption"),
        (JobState.NODE_FAIL, "lost_host"),
        (JobState.OUT_OF_MEMORY, "oom"),
        (JobState.FAILED, "killed"),
        (JobState.PENDING, "killed"),
        (JobState.UNKNOWN, "killed"),
    ],
)
def test_scheduler_explains_an_end_without_a_report(
    run: FakeRun, state: JobState, cause: str
) -> None:
    start(run)
    (row,) = rows(run, task(0, state, words="what the scheduler says"))
    assert row["cause"] == cause
    known = state not in (JobState.PENDING, JobState.UNKNOWN)
    silent = "ended without a report: its batch process or host was killed"
    assert row["how"] == ("job 41_0: what the scheduler says" if known else silent)


@pytest.mark.parametrize("key", [keys.failure, keys.warned, keys.hang])
def test_damaged_report_is_named_on_its_incarnation_line(
    run: FakeRun, key: Callable[[int], str]
) -> None:
    start(run)
    (run.paths.names / encode(key(1))).write_bytes(b"\0")
    start(run, job="7.1.0", number=1)
    first, second = rows(run)
    assert first["how"].endswith(f"; the name {key(1)} is damaged; the trial continues without it")
    assert "damaged" not in second["how"]


def test_incarnation_end_comes_from_the_history(run: FakeRun) -> None:
    start(run)
    run.end(Kind.CANCELLED, reason="cancelled by me")
    run.resume()
    start(run, "8.0.0", 1, "42_0")
    run.end(Kind.FAILED, reason="failed twice\nand more")
    run.resume()
    start(run, "9.0.0", 2, "43_0")
    run.commit(60)
    run.end(Kind.FINISHED, step=60, reason="total_steps")
    found = [(row["cause"], row["how"], row["job_id"]) for row in rows(run)]
    assert found == [
        ("cancelled", "cancelled by me", "41_0"),
        ("gave_up", "gave up: failed twice", "42_0"),
        ("finished", "finished", "43_0"),
    ]


def test_row_shows_steps_commits_and_hosts(run: FakeRun) -> None:
    first = start(run)
    run.event("supervisor.trainer.7.0", "start", link=0, job="7.0", hosts=["n0", "n1", "n2"])
    run.event("supervisor.trainer.7.0", "round", round=0, hosts=["n0", "n1"])
    run.event("supervisor.trainer.7.0", "round", round=1, hosts=["n0", "n2"])
    run.event(f"master.{first}", "ready", step=0)
    run.commit(10)
    run.event(f"master.{first}", "commit", step=10, seconds=1.0)
    run.name(keys.failure(first), cause="lost_host", host="n1")
    second = start(run, "7.0.1", 1)
    run.attempt("41_0", task=1, host="n2", job="7.0.1")
    run.say(second, step=13, phase="running", tasks={}, time=1.0)
    lost, running = rows(run, task(0, JobState.RUNNING), alive=True)
    assert (lost["hosts"], running["hosts"]) == (["n0", "n1"], ["n0", "n2"])
    assert (lost["from_step"], lost["to_step"], lost["commit"]) == (0, 10, 10)
    assert (running["from_step"], running["to_step"], running["commit"]) == (10, 13, None)
    assert (lost["how"], running["how"]) == ("host n1 lost", "running")


def test_killed_step_is_not_explained_by_the_end_of_a_later_round(run: FakeRun) -> None:
    start(run)
    start(run, "7.0.1", 1)
    writer = "supervisor.trainer.7.0"
    run.event(writer, "round", round=0, hosts=["n0", "n1"])
    run.event(writer, "round", round=1, hosts=["n0", "n1"])
    run.event(writer, "end", code=137, why="too few hosts of this job are left")
    first, second = rows(run)
    assert (first["cause"], "and the job continued" in first["how"]) == ("killed", True)
    assert second["how"] == "its agents ended: too few hosts of this job are left"


def test_row_counts_steps_lost_by_a_kill(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """At first the metrics show them, later the event of the incarnation that repeats them."""
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    start(run)
    run.event("master.1", "ready", step=0)
    now[0] = 1010.0
    run.commit(4)
    run.metrics(*({"step": n, "time": 1000.0 + 2 * n, "time/total": 2.0} for n in range(1, 8)))
    status = assemble(read(run.paths, DETAILED), [])
    (killed,) = status["incarnations"]
    assert (killed["to_step"], killed["commit"], killed["lost_steps"]) == (7, 4, 3)
    assert status["timing"]["effective_ratio"] == pytest.approx(8.0 / 14.0)
    start(run, "8.0.0", 1, "41_1")
    recorder = MetricsRecorder(run.paths, Logging(), last_step=4)
    run.event("master.2", "repeats", first=recorder.repeated[0], last=recorder.repeated[-1])
    run.say(2, step=5, phase="running", tasks={}, time=1020.0)
    killed, running = rows(run, task(1, JobState.RUNNING), alive=True)
    assert (killed["to_step"], killed["commit"], killed["lost_steps"]) == (7, 4, 3)
    assert (running["to_step"], running["lost_steps"]) == (5, 0)
    assert not MetricsRecorder(run.paths, Logging(), last_step=4).repeated


def test_failed_incarnation_of_a_running_trial_has_ended(run: FakeRun) -> None:
    number = start(run)
    run.name(keys.failure(number), cause="hung", **WORKER)
    (row,) = rows(run, task(0, JobState.RUNNING), alive=True)
    assert row["cause"] == "hung"


@pytest.mark.parametrize(
    ("element", "restarts", "cause"), [(0, 0, "running"), (1, 0, "killed"), (0, 1, "killed")]
)
def test_restarted_job_does_not_revive_an_earlier_incarnation(
    run: FakeRun, element: int, restarts: int, cause: str
) -> None:
    start(run)
    run.say(1, phase="running", step=5, tasks={}, waiting={"for": [0], "what": "x", "since_s": 9})
    running = task(element, JobState.RUNNING, restarts=restarts)
    status = assemble(read(run.paths), [running], alive=True)
    assert status["incarnations"][0]["cause"] == cause
    lives = cause == "running"
    assert (status["phase"] == "running") is (status["waiting"] is not None) is lives
    assert status["findings"][0]["code"] == ("running" if lives else "restarting")


def test_only_the_newest_incarnations_are_shown(run: FakeRun) -> None:
    for number in range(DETAILED + 5):
        start(run, f"{number}.0.0", number, f"41_{number}")
    found = rows(run)
    assert [row["number"] for row in found] == list(range(6, DETAILED + 6))
    assert found[0]["job_id"] == "41_5"


def test_cancelled_run_is_not_reported_as_preempted(run: FakeRun) -> None:
    """Its processes get the same signal as preempted processes."""
    number = start(run)
    run.end(Kind.CANCELLED, reason="cancelled by me")
    run.name(keys.warned(number), signal="SIGTERM", cause="preemption")
    run.event("agent.trainer.0.0", "join", incarnation=number)
    run.event("agent.trainer.0.0", "warned", signal="SIGTERM", cause="preemption")
    run.resume()
    run.end(Kind.CANCELLED, reason="cancelled once more")
    (row,) = rows(run)
    assert (row["cause"], row["how"]) == ("cancelled", "cancelled by me")


def test_later_cancel_in_the_queue_keeps_the_cause_preemption(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = start(run)
    run.name(keys.warned(number), signal="SIGTERM", cause="preemption")
    run.event("agent.trainer.0.0", "join", incarnation=number)
    run.event("agent.trainer.0.0", "warned", signal="SIGTERM", cause="preemption")
    later = time.time() + 60
    monkeypatch.setattr("time.time", lambda: later)
    run.end(Kind.CANCELLED, reason="cancelled by me")
    (row,) = rows(run)
    assert row["cause"] == "preemption"
    assert row["seconds"] < 60
