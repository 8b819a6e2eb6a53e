"""The batch process submits an evaluation of each checkpoint, once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.load import dump
from slurmrl.history.record import Kind
from slurmrl.workers.supervisor import checkpoint_evaluations
from slurmrl.workers.supervisor.checkpoint_evaluations import TRIES, CheckpointEvaluations
from tests.fake_runs import FakeRun


class Site:
    """A run with two suites, and the commands that were run about it."""

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

    def answer(self, command: list[str]) -> str:
        self.commands.append(command)
        return self.error

    def link(self, *, ended: bool = True) -> None:
        """A link that begins and ends."""
        link = CheckpointEvaluations(
            self.run.paths, "slurm", lambda kind, data: self.said.append((kind, data))
        )
        link.start()
        link.stop(ended=ended)


@pytest.fixture
def site(tmp_path: Path, make_settings: Any, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path, make_settings)
    monkeypatch.setattr(checkpoint_evaluations, "_error", made.answer)
    return made


def test_each_suite_of_each_checkpoint_is_submitted_once_whichever_link_does_so(
    site: Site,
) -> None:
    """On as many rows as evaluations during training have, rounded up to batches of 4."""
    site.run.commit(2)
    site.link(ended=False)
    assert site.commands == [], "the next link looks"
    site.link()
    site.run.commit(4)
    site.link()
    shown = [command[4:] for command in site.commands]
    assert [command[:4] for command in shown] == [
        ["eval", str(site.run.paths.config), "--checkpoint", f"add/1@{step}"]
        for step in (2, 2, 4, 4)
    ]
    assert shown[0][-4:] == ["--suite", "a", "--detach", "--no-check"]
    assert shown[1][-5:] == ["--suite", "b", "--detach", "--no-check", "total_steps=3"]
    assert site.said[0] == ("evaluation", {"step": 2, "suite": "a"})
    assert len(site.said) == 4


def test_evaluations_run_the_code_of_the_trial_and_need_no_site_profile(
    site: Site, make_settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's files may have changed since, and their profiles may be several."""
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


def test_a_submission_that_fails_is_tried_again_and_told(site: Site) -> None:
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


def test_submissions_that_the_end_of_the_trial_does_not_wait_for_are_told(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(checkpoint_evaluations, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(checkpoint_evaluations, "_error", lambda _: str(answered.wait(60)))
    site.run.commit(2)
    site.link()
    answered.set()
    reason = "the last submissions took longer than 0.1 s"
    assert ("evaluation_failed", {"reason": reason}) in site.said


def test_nothing_is_submitted_for_a_trial_that_was_cancelled_or_wants_none(
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


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    script = ["/bin/sh", "-c", "echo 'no such partition' >&2; exit 3"]
    assert checkpoint_evaluations._error(script) == "no such partition"
    assert checkpoint_evaluations._error(["/bin/sh", "-c", "exit 3"]) == "exit code 3"
    assert checkpoint_evaluations._error(["/bin/true"]) == ""
    assert "absent" in checkpoint_evaluations._error([str(tmp_path / "absent")])
