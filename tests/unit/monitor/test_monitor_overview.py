from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmrl.cli import status_text
from slurmrl.run.history.slots import Kind
from slurmrl.run.paths import RunPaths
from slurmrl.watch import overview
from slurmrl.watch.overview import collect, glance
from tests.fake_runs import FakeRun, FakeScheduler


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    """A trial at step 40 of 60; its only evaluation is older than the lines that lists parse."""
    run = FakeRun(tmp_path)
    run.submission()
    run.say(run.begin(), step=40, total_steps=60)
    run.metrics({"step": 10, "eval/reward": 0.25})
    run.metrics(*({"step": step, "reward": 0.5, "actor_skipped": 0} for step in range(11, 41)))
    run.commit(30)
    return run


def shown(paths: RunPaths, look: Callable[..., list[dict[str, Any]]]) -> tuple[str, object]:
    def unreadable(paths: RunPaths, error: Exception) -> None:
        raise error

    [status] = look([paths], lambda kind: FakeScheduler(), unreadable=unreadable)
    return status_text.many([status], now=0.0), status["findings"]


def finished_without_learning(run: FakeRun) -> None:
    run.metrics(*({"step": step, "actor_skipped": 1} for step in range(41, 61)))
    run.append(Kind.EXPORT, step=60, directory="step-00000060")
    run.end(Kind.FINISHED, step=60, reason="total_steps")


ENDS: dict[str, Callable[[FakeRun], None]] = {
    "finished": finished_without_learning,
    "early": lambda run: run.end(Kind.FINISHED, step=40, reason="stop_when"),
    "failed": lambda run: run.end(Kind.FAILED, reason="no commit\nmore", traceback="…"),
    "cancelled": lambda run: run.end(Kind.CANCELLED, reason="cancelled by me"),
}


@pytest.mark.parametrize("end", ENDS)
def test_list_shows_an_ended_trial_without_reading_its_history(run: FakeRun, end: str) -> None:
    ENDS[end](run)
    truth = shown(run.paths, collect)
    assert overview.read_overview(run.paths) is None
    assert shown(run.paths, glance) == truth, "killed before the overview, or an old trial"
    overview.keep_overview(run.paths)
    for record in run.paths.history.iterdir():
        record.write_text("unreadable")
    assert shown(run.paths, glance) == truth


def ended_otherwise(run: FakeRun) -> None:
    run.resume()
    run.end(Kind.FAILED, reason="another")


CHANGES: dict[str, Callable[[FakeRun], None]] = {
    "resumed": FakeRun.resume,
    "ended otherwise": ended_otherwise,
    "record of a late master": lambda run: run.append(Kind.EXPORT, step=40, directory="step-40"),
    "line of a late master": lambda run: run.metrics({"step": 41, "reward": 1.0}),
    "damaged": lambda run: run.paths.overview.write_text('{"records": '),
    "hostile": lambda run: run.paths.overview.write_text(
        json.dumps(json.loads(run.paths.overview.read_text()) | {"state": "RUNNING"})
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_list_detects_a_change_after_the_overview(run: FakeRun, change: str) -> None:
    ENDS["cancelled"](run)
    overview.keep_overview(run.paths)
    assert overview.read_overview(run.paths) is not None
    CHANGES[change](run)
    assert overview.read_overview(run.paths) is None
    assert shown(run.paths, glance) == shown(run.paths, collect)
    overview.keep_overview(run.paths)
    assert (overview.read_overview(run.paths) is None) == (change == "resumed")
    assert shown(run.paths, glance) == shown(run.paths, collect)


def test_overview_is_not_written_for_a_live_trial(run: FakeRun) -> None:
    overview.keep_overview(run.paths)
    assert not run.paths.overview.exists()


def test_overview_is_not_written_for_an_unreadable_trial(run: FakeRun) -> None:
    ENDS["cancelled"](run)
    run.paths.submission_request(1).write_text("[")
    overview.keep_overview(run.paths)
    assert not run.paths.overview.exists()


def test_unreadable_overview_hides_no_trial(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a list of trials nor the end of a job fails because of it."""
    ENDS["cancelled"](run)
    overview.keep_overview(run.paths)
    truth = shown(run.paths, collect)
    stat = Path.stat

    def stale(path: Path, **options: Any) -> Any:
        if path == run.paths.metrics:
            raise OSError(errno.ESTALE, "Stale file handle")
        return stat(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", stale)
        assert overview.read_overview(run.paths) is None
        overview.keep_overview(run.paths)
    assert shown(run.paths, glance) == truth
