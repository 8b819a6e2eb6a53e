"""Evaluations of a trial's checkpoints by trials of ``slurmrl eval``, as its readers see them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from slurmrl.run import metrics
from slurmrl.watch import snapshot
from tests.fake_runs import FakeRun, evaluation


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    """A trial whose second incarnation continues from step 20."""
    made = FakeRun(tmp_path)
    made.begin()
    made.commit(20)
    made.begin(base="step-00000020.1")
    made.metrics(*({"step": step, "reward": step / 100} for step in (19, 20, 30, 40)))
    return made


def test_unreadable_summary_is_left_out(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary is on a file system that does not answer for a while, while the trial's file
    system does.
    """
    summary = evaluation(run.paths, "add-1-step-40", "step-00000040.2-checkpoint", loss=2.0)
    stat = Path.stat

    def failing(path: Path, **options: Any) -> os.stat_result:
        if path == summary:
            raise OSError(errno.EIO, "Input/output error")
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", failing)
    assert metrics.newest_evaluated(run.paths) == {}


def test_evaluated_checkpoints_have_lines(run: FakeRun) -> None:
    """The lines use the names of evaluations during training, and of the suite."""
    paths = run.paths
    several = {"avg@4": 0.5, "pass@4": 0.7}
    evaluation(paths, "add-1-step-20", "step-00000020.1-checkpoint", **several)
    evaluation(paths, "add-1-step-40-a", "step-00000040.2-checkpoint", "a", **{"avg@1": 0.25})
    evaluation(paths, "add-1-step-40-b-1", "step-00000040", "b-1", loss=2.0)
    assert metrics.read_evaluated(paths) == [
        {
            "step": 20,
            "eval/reward": 0.5,
            "eval/reward/low": 0.4,
            "eval/reward/high": None,
            "eval/pass@4": 0.7,
            "eval/pass@4/low": pytest.approx(0.6),
            "eval/pass@4/high": None,
        },
        {
            "step": 40,
            "eval/a/reward": 0.25,
            "eval/a/reward/low": 0.15,
            "eval/a/reward/high": None,
            "eval/b-1/loss": 2.0,
            "eval/b-1/loss/low": 1.9,
            "eval/b-1/loss/high": None,
        },
    ]
    assert metrics.newest_evaluated(paths)["eval/b-1/loss"] == 2.0
    merged = metrics.all_lines(paths)
    assert [line["step"] for line in merged] == [19, 20, 30, 40]
    assert (merged[1]["reward"], merged[1]["eval/reward"]) == (0.2, 0.5)
    shown = snapshot.read(paths).metrics
    assert (shown["step"], shown["reward"], shown["eval/a/reward"]) == (40, 0.4, 0.25)


def test_results_of_other_trials_and_rolled_back_steps_are_left_out(
    run: FakeRun, tmp_path: Path
) -> None:
    """Covers another trial's model, a checkpoint of a rolled-back step, an unfinished trial, and a
    truncated file.
    """
    paths = run.paths
    another = FakeRun(tmp_path, trial="2")
    another.begin()
    other = another.paths
    evaluation(other, "add-2-step-20", "step-00000020.1-checkpoint", **{"avg@1": 0.1})
    evaluation(paths, "add-1-step-30", "step-00000030.1-checkpoint", **{"avg@1": 0.2})
    (paths.evaluated() / "add-1-step-40").mkdir()
    cut = evaluation(paths, "add-1-step-35", "step-00000035.2-checkpoint", **{"avg@1": 0.3})
    cut.write_bytes(cut.read_bytes()[:90])
    assert metrics.read_evaluated(paths) == []
    assert metrics.newest_evaluated(paths) == {}
    evaluation(paths, "add-1-step-10", "step-00000010.1-checkpoint", **{"avg@1": 0.4})
    assert metrics.newest_evaluated(paths)["step"] == 10
    assert len(metrics.read_evaluated(other)) == 1


def test_trial_values_override_evaluations_and_later_evaluations_override_earlier(
    run: FakeRun,
) -> None:
    paths = run.paths
    first = evaluation(paths, "add-1-step-40", "step-00000040.2-checkpoint", **{"avg@1": 0.1})
    evaluation(paths, "add-1-step-40-2", "step-00000040.2-checkpoint", **{"avg@1": 0.2})
    assert metrics.newest_evaluated(paths)["eval/reward"] == 0.2
    os.utime(first, (4e9, 4e9))
    assert metrics.newest_evaluated(paths)["eval/reward"] == 0.1
    own = [{"step": 40, "eval/reward": 0.9}]
    assert metrics.with_evaluated(own, metrics.read_evaluated(paths))[-1]["eval/reward"] == 0.9
