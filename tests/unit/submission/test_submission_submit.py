from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.load import load_resolved
from slurmrl.desk import submitting, trial_jobs
from slurmrl.desk.proposal import propose, propose_resume, trial_uuid
from slurmrl.desk.submitting import Submitted, submit
from slurmrl.desk.trial_jobs import cancel, remove
from slurmrl.env import user_name
from slurmrl.errors import (
    ConfigError,
    EnvironmentFailure,
    SchedulerError,
    UsageError,
    WaitTimeoutError,
)
from slurmrl.plan.model import Plan
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import TrialState, begin, end, fold
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import JobState
from slurmrl.scheduler.submission import ProcessId
from slurmrl.watch import overview
from slurmrl.watch.overview import collect
from tests.fake_runs import FakeScheduler, task, write_config

Submit = Callable[..., Submitted]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


@pytest.fixture
def again(config: Path, scheduler: FakeScheduler) -> Submit:
    def run(*overrides: str, **options: Any) -> Submitted:
        root = str(config.parent / "runs")
        return submit(propose(config, overrides, root=root, scheduler="local", **options))

    return run


def history(paths: RunPaths) -> TrialState:
    return fold(History(paths.history).read())


def train(paths: RunPaths, step: int) -> None:
    """Append the history records of a run."""
    log = History(paths.history)
    begin(log, {}).append(Kind.COMMIT, {"step": step, "directory": f"step-{step:08d}.1"})


def finish(paths: RunPaths, step: int, reason: str) -> None:
    train(paths, step)
    end(History(paths.history), Kind.FINISHED, {"step": step, "reason": reason})


def test_new_trial_is_prepared_and_submitted(
    again: Submit, scheduler: FakeScheduler, config: Path
) -> None:
    submitted = again("trial=7")
    assert submitted.trial == "add/7"
    assert submitted.paths == RunPaths.of(config.parent / "runs", user_name(), "add", "7")
    assert submitted.jobs is not None
    assert (submitted.jobs.number, submitted.jobs.ids) == (1, {"trainer": ("41",)})
    assert submitted.resumed_step is None
    request = json.loads(submitted.paths.submission_request(1).read_text())
    assert (request["scheduler"], request["total_steps"], request["heartbeat_s"]) == ("local", 6, 2)
    (asked,) = scheduler.requests
    assert (asked.trial, asked.number, len(asked.uuid)) == ("add/7", 1, 32)
    assert [(group.name, group.hosts, group.links) for group in asked.groups] == [("trainer", 1, 8)]
    assert asked.options["slurm"]["links"] == 8
    resolved = load_resolved(submitted.paths.config)
    assert (resolved.cluster.scheduler, resolved.root) == ("local", str(config.parent / "runs"))


def test_live_trial_rejects_a_second_submission(again: Submit, scheduler: FakeScheduler) -> None:
    again()
    scheduler.tasks = [task(0, JobState.PENDING)]
    with pytest.raises(UsageError, match=r"add/1 is live \(job 41_0, PENDING\)"):
        again()
    assert len(scheduler.requests) == 1


def test_submit_fails_if_the_scheduler_does_not_answer(
    again: Submit, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    again()
    scheduler.problem = "squeue did not answer"
    monkeypatch.setattr(FakeScheduler, "check", lambda self: None)
    monkeypatch.setattr(FakeScheduler, "query", _no_answer)
    with pytest.raises(EnvironmentFailure):
        again()
    assert len(scheduler.requests) == 1


def _no_answer(self: FakeScheduler, jobs: object) -> None:
    raise EnvironmentFailure("squeue did not answer")


def test_trial_keeps_its_precision_if_the_default_differs(
    again: Submit, scheduler: FakeScheduler
) -> None:
    """Without a configured precision, a trial continues in its first precision. Another configured
    precision is rejected. Before the first commit, the default applies.
    """
    paths = again("actor.dtype=bfloat16").paths
    scheduler.tasks = [task(0, JobState.FAILED)]
    again()
    assert load_resolved(paths.config).actor.dtype == "float32"
    again("actor.dtype=bfloat16")
    train(paths, 4)
    scheduler.tasks = [task(0, JobState.FAILED)]
    again("total_steps=9")
    assert load_resolved(paths.config).actor.dtype == "bfloat16"
    with pytest.raises(UsageError, match=r"actor\.dtype: 'bfloat16' in the trial, 'float32' now"):
        again("total_steps=9", "actor.dtype=float32")


def test_cores_and_memory_reach_the_batch_script(config: Path) -> None:
    """Slurm is asked for exactly the resources that the plan gives the workers of a host."""
    overrides = ("cluster.gpus_per_worker=1", "actor.backend=fsdp:d2")
    proposal = propose(config, overrides, root=str(config.parent / "runs"), scheduler="slurm")
    group, script = proposal.plan.groups[0], proposal.scripts()["trainer"]
    assert "#SBATCH --cpus-per-task=16\n" in script
    assert group.mem_per_worker is not None
    assert f"#SBATCH --mem={2 * int(group.mem_per_worker[:-1])}G\n" in script


def test_interrupted_trial_continues(again: Submit, scheduler: FakeScheduler) -> None:
    paths = again().paths
    train(paths, 4)
    scheduler.tasks = [task(0, JobState.FAILED)]
    submitted = again("total_steps=9")
    assert submitted.jobs is not None
    assert (submitted.jobs.number, submitted.resumed_step) == (2, 4)
    assert load_resolved(paths.config).total_steps == 9
    assert [record.kind for record in History(paths.history).read()] == [Kind.BEGIN, Kind.COMMIT]
    assert scheduler.requests[0].uuid == scheduler.requests[1].uuid


def test_trial_with_checkpoints_and_an_empty_history_is_rejected(again: Submit) -> None:
    """It would begin again and remove the checkpoints."""
    paths = again().paths
    (paths.checkpoints / "lost+found").mkdir()
    again()  # before the first incarnation, there are no checkpoints
    (paths.checkpoints / "step-4.1").mkdir()
    with pytest.raises(
        UsageError, match=r"history is empty, .* its checkpoints step-4\.1: restore"
    ):
        again()


def test_learning_rate_change_of_a_longer_run_is_reported(again: Submit) -> None:
    falling = "actor.optimizer.schedule=linear"
    train(again(falling).paths, 4)
    [note] = again(falling, "total_steps=9").notes
    assert "schedule of its learning rate ends after 9 optimizer steps, not 6" in note
    assert again(falling, "total_steps=9").notes == ()


def test_submit_resumes_an_ended_trial_from_its_commit(
    again: Submit, scheduler: FakeScheduler
) -> None:
    paths = again().paths
    train(paths, 4)
    assert cancel(paths) is Kind.CANCELLED
    assert history(paths).end is not None
    assert overview.read_overview(paths) is not None
    submitted = again()
    assert submitted.resumed_step == 4
    assert history(paths).end is None
    assert scheduler.done == ["cancel"]


def test_jobs_of_an_ended_trial_end_before_new_submission(
    again: Submit, scheduler: FakeScheduler
) -> None:
    paths = again().paths
    end(History(paths.history), Kind.FAILED, {"reason": "x"})
    scheduler.tasks = [task(0, JobState.RUNNING)]
    again()
    assert scheduler.done == ["cancel"]
    assert len(scheduler.requests) == 2


def test_jobs_that_do_not_end_are_named(
    again: Submit, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = again().paths
    end(History(paths.history), Kind.FAILED, {"reason": "x"})
    scheduler.tasks = [task(0, JobState.RUNNING)]
    monkeypatch.setattr(FakeScheduler, "cancel", lambda self, jobs: None)
    monkeypatch.setattr(trial_jobs, "LEAVE_TIMEOUT_S", 0.0)
    with pytest.raises(WaitTimeoutError, match=r"41_0 \(RUNNING\)"):
        again()
    assert len(scheduler.requests) == 1


def test_resume_replaces_rollout_tasks_without_trainers(
    again: Submit, scheduler: FakeScheduler
) -> None:
    """Neither a running nor a held task makes a trial live."""
    paths = again().paths
    train(paths, 3)
    scheduler.jobs[paths.run, 1] = {"trainer": ("41",), "rollout": ("42",)}
    scheduler.tasks = [
        task(0, JobState.CANCELLED),
        task(0, JobState.RUNNING, job="42"),
        task(1, JobState.PENDING, job="42", reason="JobHeldUser"),
    ]
    submitted = again()
    assert scheduler.done == ["cancel"]
    assert (submitted.resumed_step, len(scheduler.requests)) == (3, 2)


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.RUNNING])
def test_trial_stays_live_with_a_job_of_trainers_and_of_tasks(
    again: Submit, scheduler: FakeScheduler, state: JobState
) -> None:
    paths = again().paths
    scheduler.jobs[paths.run, 1] = {"rollout": ("42",), "trainer": ("41",)}
    scheduler.tasks = [task(1, state), task(0, JobState.RUNNING, job="42")]
    with pytest.raises(UsageError, match=r"add/1 is live \(job 41_1"):
        again()
    assert scheduler.done == []


def rejects(scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    def submit(self: FakeScheduler, request: object) -> None:
        raise SchedulerError(f"sbatch failed (1): {words}")

    monkeypatch.setattr(FakeScheduler, "submit", submit)


REJECTED = "sbatch: error: Batch job submission failed: Invalid account"


def test_rejected_submission_leaves_no_files(
    again: Submit, config: Path, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejects(scheduler, monkeypatch, REJECTED)
    with pytest.raises(SchedulerError, match="Invalid account"):
        again()
    assert not list((config.parent / "runs").rglob("*.json"))


@pytest.mark.parametrize("kind", [Kind.FAILED, Kind.CANCELLED, None])
def test_rejected_resume_does_not_change_the_trial(
    again: Submit,
    scheduler: FakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind | None,
) -> None:
    paths = again().paths
    if kind is not None:
        end(History(paths.history), kind, {"reason": "x"})
    before = paths.config.read_bytes(), paths.plan.read_bytes()
    rejects(scheduler, monkeypatch, REJECTED)
    with pytest.raises(SchedulerError, match="Invalid account"):
        again("seed=2")
    assert (paths.config.read_bytes(), paths.plan.read_bytes()) == before
    ended = history(paths).end
    assert (ended.kind if ended else None) is kind
    assert not paths.submission(2).exists()


@pytest.mark.parametrize("words", ["Socket timed out on send/recv operation"])
def test_submission_is_kept_if_its_jobs_may_be_queued(
    again: Submit,
    config: Path,
    scheduler: FakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
) -> None:
    rejects(scheduler, monkeypatch, words)
    with pytest.raises(SchedulerError, match=words):
        again()
    assert list((config.parent / "runs").rglob("request.json"))


def test_status_is_being_submitted_while_submit_runs(
    again: Submit, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status names the submitter, because a trial during its submission must not look
    interrupted.
    """
    paths = again().paths
    request = {**json.loads(paths.submission_request(1).read_text()), "pid": os.getppid()}
    parent = ProcessId.of(os.getppid())
    assert parent is not None
    request["start_ticks"] = parent.start_ticks
    paths.submission_request(1).write_text(json.dumps(request))
    scheduler.jobs.clear()
    [status] = collect([paths], lambda kind: scheduler)
    assert status["state"] == "PENDING"
    assert status["diagnosis"].startswith("being submitted on ")
    paths.submission_jobs(1).write_text("{}")
    [status] = collect([paths], lambda kind: scheduler)
    assert status["state"] == "INTERRUPTED"


def test_changed_configuration_is_rejected_with_the_differences(
    again: Submit, scheduler: FakeScheduler
) -> None:
    train(again().paths, 2)
    with pytest.raises(UsageError, match=r"seed: 1 in the trial, 2 now\n  actor.optimizer.lr: "):
        again("seed=2", "actor.optimizer.lr=1.0")
    with pytest.raises(
        UsageError,
        match=r"seed: 1 .*\nSettings that a trial may change: checkpoint, .* of each model",
    ):
        again("seed=2", "actor.backend=fsdp:d2")
    assert len(scheduler.requests) == 1


def test_trial_without_a_commit_accepts_any_configuration(
    again: Submit, scheduler: FakeScheduler
) -> None:
    paths = again().paths
    begin(History(paths.history), {})
    submitted = again("seed=2", "actor.optimizer.lr=1.0")
    assert load_resolved(paths.config).seed == 2
    assert submitted.notes[0] == "starts from the beginning with seed: 1 in the trial, 2 now"
    end(History(paths.history), Kind.FAILED, {"reason": "diverged"})
    root = str(paths.run.parents[2])
    submit(propose_resume(RunPaths.of(Path(root), user_name(), "add", "1"), ["seed=3"]))
    assert load_resolved(paths.config).seed == 3
    assert Plan.read(paths.plan)
    assert (history(paths).end, len(scheduler.requests)) == (None, 3)


@pytest.mark.parametrize(
    ("reason", "step", "overrides", "complete"),
    [
        ("total_steps", 6, [], True),
        ("total_steps", 6, ["total_steps=5"], True),
        ("total_steps", 6, ["total_steps=7"], False),
        ("stop_when: loss <= 1", 3, [], True),
        ("stop_when: loss <= 1", 3, ["stop_when=loss <= 0.5"], False),
        ("stop_when: loss <= 1", 3, ["stop_when="], False),
    ],
)
def test_complete_trial_is_resumed_only_for_more_steps(
    again: Submit,
    scheduler: FakeScheduler,
    reason: str,
    step: int,
    overrides: list[str],
    complete: bool,
) -> None:
    paths = again("stop_when=loss <= 1").paths
    finish(paths, step, reason)
    submitted = again("stop_when=loss <= 1", *overrides)
    assert (submitted.jobs is None) is complete
    assert (history(paths).end is not None) is complete
    assert len(scheduler.requests) == (1 if complete else 2)


def test_new_option_takes_the_next_free_name(again: Submit, config: Path) -> None:
    assert [again(new=True).trial for _ in range(3)] == ["add/1", "add/2", "add/3"]
    late = propose(config, [], root=str(config.parent / "runs"), scheduler="local", new=True)
    assert (again(new=True).trial, submit(late).trial) == ("add/4", "add/5")
    assert again("trial=x", new=True).trial == "add/x"
    assert again("trial=x", new=True).trial == "add/x-2"


def test_concurrent_removals_of_two_trials_succeed(
    again: Submit, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (again(f"trial={number}").paths for number in (1, 2))
    rmtree = shutil.rmtree

    def removed_by_another(folder: Path, **options: Any) -> None:
        rmtree(folder, **options)
        if not options:
            raise FileNotFoundError(2, "No such file or directory", "file")

    monkeypatch.setattr(shutil, "rmtree", removed_by_another)
    remove(first)
    remove(second)
    assert not first.run.parent.exists()


@pytest.mark.parametrize("failures", [2, 99])
def test_removal_is_repeated_up_to_a_limit(
    again: Submit, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """Some file systems list a name that cannot be opened."""
    paths = again().paths
    rmtree, calls = shutil.rmtree, []

    def fail(folder: Path, **options: Any) -> None:
        calls.append(folder)
        if 1 < len(calls) <= 1 + failures:
            assert len(calls) < 50, "the removal must give up"
            raise FileNotFoundError(2, "No such file or directory", "file")
        rmtree(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", fail)
    monkeypatch.setattr("time.sleep", lambda pause_s: None)
    if failures > 2:
        with pytest.raises(EnvironmentFailure, match="file: No such file or directory"):
            remove(paths)
    else:
        remove(paths)
        assert len(calls) == 4
        assert not paths.run.parent.exists()


def test_resumed_copy_gets_its_own_uuid(again: Submit, scheduler: FakeScheduler) -> None:
    original = again().paths
    root = original.run.parents[2]
    copied = RunPaths.of(root.with_name("archive"), user_name(), "add", "1")
    shutil.copytree(original.run, copied.run)
    submit(propose_resume(copied, [], scheduler="local"))
    submit(propose_resume(original, [], scheduler="local"))
    first, copy, resumed = (request.uuid for request in scheduler.requests)
    assert first == resumed != copy == trial_uuid(copied)
    shutil.rmtree(original.run)
    moved = RunPaths.of(root.with_name("moved"), user_name(), "add", "1")
    shutil.copytree(copied.run, moved.run)
    shutil.rmtree(copied.run)
    submit(propose_resume(moved, [], scheduler="local"))
    assert trial_uuid(moved) == copy


def test_copy_gets_its_own_uuid_after_a_killed_submission(
    again: Submit, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a copy that an older version has submitted with the original's uuid."""

    def kill(*arguments: object) -> None:
        raise KeyboardInterrupt

    original = again().paths
    copied = RunPaths.of(original.run.parents[2].with_name("archive"), user_name(), "add", "1")
    shutil.copytree(original.run, copied.run)
    with monkeypatch.context() as patch:
        patch.setattr(submitting, "identify", kill)
        with pytest.raises(KeyboardInterrupt):
            submit(propose_resume(copied, [], scheduler="local"))
    assert copied.submission_request(2).exists()
    assert trial_uuid(copied) == trial_uuid(original)
    submit(propose_resume(copied, [], scheduler="local"))
    changed = trial_uuid(copied)
    assert changed != trial_uuid(original)
    submit(propose_resume(copied, [], scheduler="local"))
    assert trial_uuid(copied) == changed


def test_resume_uses_the_recorded_configuration(
    again: Submit, config: Path, scheduler: FakeScheduler
) -> None:
    paths = again("seed=5").paths
    config.unlink()
    submitted = submit(propose_resume(paths, ["total_steps=8"]))
    assert submitted.jobs is not None
    assert submitted.jobs.number == 2
    resolved = load_resolved(paths.config)
    assert (resolved.seed, resolved.total_steps, resolved.cluster.scheduler) == (5, 8, "local")
    assert Plan.from_json(paths.plan.read_text()).trial == "1"


def test_resume_cannot_rename_a_trial(again: Submit) -> None:
    paths = again().paths
    with pytest.raises(UsageError, match="cannot rename"):
        propose_resume(paths, ["trial=2"])
    renamed = RunPaths(paths.run.with_name("other"))
    shutil.copytree(paths.run, renamed.run)
    with pytest.raises(UsageError, match=r"other holds the trial add/1: give the folder that name"):
        propose_resume(renamed, [])


def test_submission_names_its_run_directory(again: Submit) -> None:
    """A copy of the directory therefore knows that the jobs belong to the original."""
    paths = again().paths
    assert json.loads(paths.submission_request(1).read_text())["run"] == str(paths.run)


def test_resume_reports_all_problems(again: Submit) -> None:
    paths = again().paths
    with pytest.raises(ConfigError) as caught:
        propose_resume(paths, ["total_steps=-1", "sed=1"])
    assert [problem.key for problem in caught.value.problems] == ["total_steps", "sed"]


def test_unprepared_trial_cannot_be_resumed(again: Submit) -> None:
    paths = again().paths
    paths.config.unlink()
    with pytest.raises(UsageError, match="never submitted completely"):
        propose_resume(paths, [])


def test_one_of_two_concurrent_submissions_wins(
    again: Submit, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process submits, from claim to end, between our query and our claim."""
    claim = submitting.claim_submission

    def late(*arguments: Any) -> int:
        monkeypatch.setattr(submitting, "claim_submission", claim)
        again()
        return claim(*arguments)

    monkeypatch.setattr(submitting, "claim_submission", late)
    with pytest.raises(UsageError, match="by another process at this moment"):
        again()
    assert len(scheduler.requests) == 1


def test_submission_is_rejected_while_another_has_no_jobs_yet(
    again: Submit,
) -> None:
    """The other submitter is between its request and sbatch, or was killed."""
    paths = again().paths
    request = json.loads(paths.submission_request(1).read_text())
    other = subprocess.Popen(["sleep", "1000"])
    known = ProcessId.of(other.pid)
    assert known is not None
    request |= {"pid": known.pid, "start_ticks": known.start_ticks}
    paths.submission_request(1).write_text(json.dumps(request))
    try:
        with pytest.raises(UsageError, match=f"process {other.pid}"):
            again()
    finally:
        other.kill()
        other.wait()
    assert again().jobs is not None


def test_overtaken_submission_cancels_its_jobs(
    again: Submit, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = again().paths
    submit_really = scheduler.submit

    def overtaken(request: Any) -> dict[str, str]:
        paths.submission(3).mkdir()
        paths.submission_request(3).write_bytes(paths.submission_request(1).read_bytes())
        return submit_really(request)

    monkeypatch.setattr(scheduler, "submit", overtaken)
    with pytest.raises(UsageError, match="the jobs of this command were cancelled"):
        again()
    assert scheduler.done == ["cancel"]


def test_unused_later_submission_number_is_ignored(
    again: Submit, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submitter was killed before its request, so our jobs are still the newest."""
    paths = again().paths
    submit_really = scheduler.submit

    def beside(request: Any) -> dict[str, str]:
        paths.submission(3).mkdir()
        return submit_really(request)

    monkeypatch.setattr(scheduler, "submit", beside)
    assert again().jobs is not None
    assert scheduler.done == []


@pytest.mark.parametrize("written", ["check", "scripts"])
def test_submit_writes_nothing_before_all_checks(
    again: Submit,
    config: Path,
    scheduler: FakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
    written: str,
) -> None:
    def reject(*arguments: object) -> None:
        raise EnvironmentFailure("no")

    monkeypatch.setattr(scheduler, written, reject)
    with pytest.raises(EnvironmentFailure):
        again()
    assert not (config.parent / "runs").exists()


def test_second_cancel_has_no_effect(again: Submit, scheduler: FakeScheduler) -> None:
    paths = again().paths
    assert [cancel(paths), cancel(paths)] == [Kind.CANCELLED, Kind.CANCELLED]
    assert scheduler.done == ["cancel", "cancel"]
    assert len(History(paths.history).read()) == 1


def test_finished_trial_cannot_be_cancelled(again: Submit) -> None:
    paths = again().paths
    finish(paths, 6, "total_steps")
    assert cancel(paths) is Kind.FINISHED
