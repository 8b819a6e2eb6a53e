"""The end of an evaluation trial, and its training trial."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slurmrl import child
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import TRAINERS
from slurmrl.workers.supervisor import __main__ as supervisor
from slurmrl.workers.supervisor import checkpoint_evaluations
from slurmrl.workers.supervisor.checkpoint_evaluations import evaluated_trial
from tests.fake_runs import FakeRun


class Family:
    """A training trial and a trial that evaluates it."""

    def __init__(self, root: Path) -> None:
        self.trained = FakeRun(root)
        self.trained.paths.config.write_text("{}")
        self.other = FakeRun(root, "add-eval", "add-1-step-2")
        self.evaluates(self.trained.paths.checkpoint_to_evaluate("step-00000002.1"))

    def evaluates(self, model: Path) -> None:
        self.other.paths.config.write_text(json.dumps({"actor": {"path": str(model)}}))


@pytest.fixture
def family(tmp_path: Path) -> Family:
    return Family(tmp_path)


def test_evaluated_trial_is_found_from_its_model_path(family: Family, tmp_path: Path) -> None:
    trained, other = family.trained.paths, family.other.paths
    assert evaluated_trial(other) == trained
    family.evaluates(trained.export(2))
    assert evaluated_trial(other) == trained
    link = tmp_path / "other_path"
    link.symlink_to(other.run.parents[2], target_is_directory=True)
    assert evaluated_trial(RunPaths(link / other.run.relative_to(other.run.parents[2]))) == trained
    for model in (tmp_path / "model", trained.checkpoint(2, 1), Path("/"), Path("export/step-2")):
        family.evaluates(model)
        assert evaluated_trial(other) is None, model
    assert evaluated_trial(trained) is None


def test_late_results_of_all_evaluations_reach_the_sinks(
    family: Family, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that takes too long is killed."""
    popen, started = child.subprocess.Popen, []

    def start(command: list[str], **options: Any) -> Any:
        started.append(command[-1])
        return popen([sys.executable, "-c", "import time; time.sleep(600)"], **options)

    monkeypatch.setattr(child.subprocess, "Popen", start)
    monkeypatch.setattr(checkpoint_evaluations, "HAND_OVER_S", 0.1)
    began = time.monotonic()
    for run in (family.other, family.trained):
        checkpoint_evaluations.hand_over_results(run.paths)
    assert started == [str(family.trained.paths.run)] * 2
    assert time.monotonic() - began < 300.0
    assert "evaluations were not sent to the logging sinks within" in caplog.text


def test_next_job_does_not_wait_for_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink may hang for longer than the job has left."""
    order: list[str] = []

    def run(*_: Any) -> int:
        order.append("what follows")
        return 0

    monkeypatch.setattr(supervisor, "run", run)
    monkeypatch.setattr(supervisor.overview, "keep_overview", lambda _: order.append("keep"))
    for name in ("announce", "write_report", "hand_over_results"):
        monkeypatch.setattr(supervisor, name, lambda _, name=name: order.append(name))
    monkeypatch.setattr(supervisor.log, "configure", lambda _: None)
    arguments = ["supervisor", "--run", str(tmp_path), "--submission", "1", "--group", TRAINERS]
    monkeypatch.setattr(sys, "argv", arguments)
    assert supervisor.main() == 0
    assert order == ["what follows", "keep", "announce", "write_report", "hand_over_results"]


def test_trial_without_evaluations_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(child.subprocess, "Popen")
    run = FakeRun(tmp_path)
    run.paths.config.write_text("{}")
    checkpoint_evaluations.hand_over_results(run.paths)
