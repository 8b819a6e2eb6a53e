"""The batch process submits an evaluation of each checkpoint exactly once."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.load import dump
from slurmrl.errors import UsageError
from slurmrl.fsio.calls import temporary_beside
from slurmrl.run.history.slots import Kind
from slurmrl.run.history.state import Commit
from slurmrl.run.paths import RunPaths
from slurmrl.tensors.checkpoint.manifest import ORIGIN
from slurmrl.workers.supervisor import checkpoint_evaluations
from slurmrl.workers.supervisor.checkpoint_evaluations import TRIES, CheckpointEvaluations
from tests.fake_runs import FakeRun


class Site:
    """A run with two suites, and a record of the executed commands."""

    def __init__(self, root: Path, make_settings: Any) -> None:
        section = make_settings().config.evaluation.model_dump(mode="json")
        own = {"dataset": section["dataset"]}
        suites = {"a": own, "b": {**own, "samples": 10}}
        evaluation = {"tasks": {}, "samples": None, "suites": suites}
        self.run = FakeRun(root)
        self.run.paths.config.write_text(dump(make_settings(evaluation=evaluation).config))
        self.run.begin()
        self.commands: list[list[str]] = []
        self.said: list[tuple[str, Mapping[str, Any]]] = []
        self.error = ""

    def link_files(self, paths: RunPaths, commit: Commit) -> None:
        """Return the replacement of the links to the files."""
        folder = paths.checkpoint_to_evaluate(commit.directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ORIGIN).write_text("{}")

    def evaluation(self, step: int, suite: str) -> FakeRun:
        """Return the trial that evaluates a suite."""
        made = FakeRun(self.run.paths.run.parents[2], "add-eval", f"add-1-step-{step}-{suite}")
        model = self.run.paths.checkpoint_to_evaluate(f"step-{step:08d}.1")
        made.paths.config.write_text(json.dumps({"actor": {"path": str(model)}}))
        made.begin()
        return made

    @property
    def folders(self) -> list[str]:
        return sorted(path.name for path in self.run.paths.being_evaluated.iterdir())

    def answer(self, command: list[str]) -> str:
        self.commands.append(command)
        return self.error

    def link(self, *, ended: bool = True) -> CheckpointEvaluations:
        """Run a link from its start to its end."""
        link = CheckpointEvaluations(
            self.run.paths, "slurm", lambda kind, data: self.said.append((kind, data))
        )
        link.start()
        link.stop(ended=ended)
        return link


@pytest.fixture
def site(tmp_path: Path, make_settings: Any, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path, make_settings)
    monkeypatch.setattr(checkpoint_evaluations, "_error", made.answer)
    monkeypatch.setattr(checkpoint_evaluations, "LAST_PAUSE_S", 0.0)
    monkeypatch.setattr(checkpoint_evaluations, "resolve", lambda _: made.link_files)
    return made


def test_each_suite_of_each_checkpoint_is_submitted_once_by_any_job(
    site: Site,
) -> None:
    """The number of rows equals evaluations during training, rounded up to batches of 4."""
    site.run.commit(2)
    site.link(ended=False)
    assert site.commands == [], "the next link looks"
    site.link()
    site.run.commit(4)
    site.link()
    shown = [command[4:] for command in site.commands]
    folder = site.run.paths.being_evaluated
    assert [command[:4] for command in shown] == [
        ["eval", str(site.run.paths.config), "--checkpoint", str(folder / f"{name}-checkpoint")]
        for name in ("step-00000002.1", "step-00000002.1", "step-00000004.1", "step-00000004.1")
    ]
    assert shown[0][-4:] == ["--suite", "a", "--detach", "--no-check"]
    assert shown[1][-5:] == ["--suite", "b", "--detach", "--no-check", "total_steps=3"]
    assert site.said[0] == ("evaluation", {"step": 2, "suite": "a"})
    assert len(site.said) == 4


def test_evaluations_use_the_trials_code_and_need_no_profile(
    site: Site, make_settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's files may have changed since the submission, and there may be several profiles."""
    dataset = make_settings().config.evaluation.dataset.model_dump(mode="json")
    config = make_settings(evaluation={"dataset": dataset, "tasks": {}}).config
    config = config.model_copy(update={"code": ("/home/me/rewards.py", "/home/me/own")})
    site.run.paths.config.write_text(dump(config))
    monkeypatch.setattr(checkpoint_evaluations, "SNAPSHOT", Path("/run/code"))
    site.run.commit(2)
    site.link()
    [command] = site.commands
    assert command[1:4] == ["-P", "-m", "slurmrl"]
    assert command[command.index("--profile") + 1] == "none"
    assert command[-1] == 'code=["/run/code/rewards.py", "/run/code/own"]'


def test_failed_evaluation_submission_is_retried_and_reported(site: Site) -> None:
    """The next link tries it once more."""
    site.error = "sbatch: not here"
    site.run.commit(2)
    site.link()
    assert len(site.commands) == 2 * TRIES
    failed = {"step": 2, "suite": "a", "reason": "sbatch: not here"}
    assert ("evaluation_failed", failed) in site.said
    site.error = ""
    site.link()
    assert [kind for kind, _ in site.said].count("evaluation") == 2


def test_pauses_between_submission_attempts_grow(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure is reported once, and the attempts continue, even if the checkpoint was deleted."""
    now = [1000.0]
    monkeypatch.setattr(checkpoint_evaluations.time, "monotonic", lambda: now[0])
    site.error = "sbatch: the queue is full"
    site.run.commit(2)
    link = CheckpointEvaluations(
        site.run.paths, "slurm", lambda kind, data: site.said.append((kind, data))
    )
    tried = []
    for minute in (0, 0.5, 1, 2.4, 3, 5.9, 7):
        now[0] = 1000.0 + 60 * minute
        before = len(site.commands)
        link._look()
        tried += [minute] * (len(site.commands) - before)
        if minute == 1:
            site.run.append(Kind.DELETE, step=2, directory="step-00000002.1")
    assert tried == [0, 0, 1, 1, 3, 3, 7, 7], "both suites"
    assert [kind for kind, _ in site.said] == ["evaluation_failed", "evaluation_failed"]
    site.error, now[0] = "", now[0] + 900
    link._look()
    assert [kind for kind, _ in site.said][2:] == ["evaluation", "evaluation"]


# -- the folders with the files of checkpoints -----------------------------------------------


def test_checkpoint_is_kept_until_all_its_evaluations_ended(site: Site) -> None:
    """Files that `slurmrl eval` keeps stay."""
    paths = site.run.paths
    pinned = paths.pinned("step-00000002.1")
    pinned.mkdir()
    site.run.commit(2)
    a, b = (site.evaluation(2, suite) for suite in "ab")
    site.link(ended=False)
    a.end(Kind.FINISHED)
    site.link()
    assert site.folders == ["step-00000002.1-checkpoint"]
    b.end(Kind.FAILED)
    checkpoint_evaluations.remove_evaluated(paths)
    assert site.folders == ["step-00000002.1-checkpoint"], "a failed one can be resumed"
    b.resume()
    checkpoint_evaluations.remove_evaluated(paths)
    assert site.folders == ["step-00000002.1-checkpoint"]
    b.end(Kind.CANCELLED)
    checkpoint_evaluations.remove_evaluated(paths)
    assert site.folders == []
    assert pinned.is_dir()


def test_removal_of_a_directory_continues_after_a_kill(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = site.run.paths
    site.run.commit(2)
    trials = [site.evaluation(2, suite) for suite in "ab"]
    site.link()
    for trial in trials:
        trial.end(Kind.FINISHED)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_evaluations.shutil, "rmtree", lambda *_, **__: None)
        checkpoint_evaluations.remove_evaluated(paths)
    assert site.folders == ["step-00000002.1-checkpoint"]
    assert not (paths.checkpoint_to_evaluate("step-00000002.1") / ORIGIN).exists()
    checkpoint_evaluations.remove_evaluated(paths)
    assert site.folders == []


def test_directories_are_kept_while_their_readers_are_unknown(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another path to the root of the trials changes nothing.

    A listing may lack a trial that was submitted a moment ago.
    """
    paths = site.run.paths
    site.run.commit(2)
    a = site.evaluation(2, "a")
    site.link()
    a.end(Kind.FINISHED)
    checkpoint_evaluations.remove_evaluated(paths)
    assert site.folders == ["step-00000002.1-checkpoint"]
    a.resume()
    other = tmp_path / "other_path"
    other.symlink_to(paths.run.parents[2], target_is_directory=True)
    same = RunPaths(other / paths.run.relative_to(paths.run.parents[2]))
    checkpoint_evaluations.remove_evaluated(same, given_up=True)
    assert site.folders == ["step-00000002.1-checkpoint"]

    def unreadable(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(checkpoint_evaluations, "evaluating_trials", unreadable)
    checkpoint_evaluations.remove_evaluated(paths)
    assert site.folders == ["step-00000002.1-checkpoint"]


def test_directory_of_abandoned_evaluations_is_removed(site: Site) -> None:
    """The directory is removed at the end of the trial, with partial files of a killed process."""
    left = temporary_beside(site.run.paths.checkpoint_to_evaluate("step-00000002.1"))
    left.mkdir(parents=True)
    site.error = "sbatch: not here"
    site.run.commit(2)
    site.link()
    assert site.folders == []


def test_checkpoint_that_cannot_be_linked_is_reported(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: Any) -> None:
        raise UsageError("a file of it is too short")

    monkeypatch.setattr(checkpoint_evaluations, "resolve", lambda _: damaged)
    site.run.commit(2)
    site.link()
    assert site.commands == []
    failed = {"step": 2, "suite": "a", "reason": "a file of it is too short"}
    assert ("evaluation_failed", failed) in site.said


def test_checkpoint_deleted_before_it_was_linked_is_reported(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of an earlier incarnation is not: `resume` may have added the evaluations."""

    def link_files(paths: RunPaths, commit: Commit) -> None:
        if commit.step < 6:
            raise UsageError("its files are gone")
        site.link_files(paths, commit)

    monkeypatch.setattr(checkpoint_evaluations, "resolve", lambda _: link_files)
    for step in (2, 4):
        site.run.begin()
        site.run.commit(step)
        site.run.append(Kind.DELETE, step=step, directory=f"step-{step:08d}.1")
    site.run.commit(6)
    site.link()
    said = [(kind, data["step"], data["suite"]) for kind, data in site.said]
    expected = [("evaluation", 6, "a"), ("evaluation", 6, "b")]
    expected += [("evaluation_failed", 4, "a"), ("evaluation_failed", 4, "b")]
    assert said == expected
    assert site.said[-1][1]["reason"] == "its files are gone"


def test_submissions_still_running_at_the_end_are_reported(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(checkpoint_evaluations, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(checkpoint_evaluations, "_error", lambda _: str(answered.wait(60)))
    site.run.commit(2)
    link = site.link()
    answered.set()
    link._thread.join(60.0)
    reason = "the last submissions took longer than 0.1 s"
    assert ("evaluation_failed", {"reason": reason}) in site.said


def test_cancelled_trial_or_trial_without_suites_submits_nothing(
    site: Site, make_settings: Callable[..., Any]
) -> None:
    site.run.commit(2)
    site.run.end(Kind.CANCELLED)
    site.link()
    other = FakeRun(site.run.paths.run.parents[2], trial="2")
    other.paths.config.write_text(dump(make_settings().config))
    other.begin()
    other.commit(2)
    site.run = other
    site.link()
    assert site.commands == []


def test_failed_submission_command_reports_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = ["/bin/sh", "-c", "echo 'no such partition' >&2; exit 3"]
    assert checkpoint_evaluations._error(script) == "no such partition"
    assert checkpoint_evaluations._error(["/bin/sh", "-c", "exit 3"]) == "exit code 3"
    assert checkpoint_evaluations._error(["/bin/true"]) == ""
    assert "absent" in checkpoint_evaluations._error([str(tmp_path / "absent")])
    monkeypatch.setattr(checkpoint_evaluations, "TIMEOUT_S", 0.1)
    late = checkpoint_evaluations._error(["/bin/sleep", "600"])
    assert late == "it did not end within 0.1 s"
