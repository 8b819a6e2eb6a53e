from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmrl.watch import present, snapshot
from slurmrl.watch.status import assemble
from tests.fake_runs import FakeRun


def lines(*seconds: float | None) -> list[dict[str, Any]]:
    return [{"step": step, "time/total": value} for step, value in enumerate(seconds, start=1)]


def ready(step: int, **more: Any) -> dict[str, Any]:
    return {"time": 100.0, "writer": "master.1", "kind": "ready", "step": step, **more}


def commit(seconds: Any, stall_s: Any = None) -> dict[str, Any]:
    return {"time": 0.0, "writer": "m", "kind": "commit", "seconds": seconds, "stall_s": stall_s}


@pytest.mark.parametrize(
    ("times", "events", "expected"),
    [
        ([], [], None),
        ([None], [], None),
        ([9.0, 1.0, 3.0], [], 13 / 3),
        ([9.0, 1.0, 3.0], [ready(0)], 2.0),
        ([9.0, 1.0, 9.0, 3.0], [ready(0), ready(2)], 2.0),
        ([9.0], [ready(0)], 9.0),
        ([50.0, *([1.0] * 20)], [], 1.0),
    ],
)
def test_step_time_is_estimated_from_recent_steps(
    times: list[float | None], events: list[Any], expected: float | None
) -> None:
    assert present.step_time_s(lines(*times), events) == expected


@pytest.mark.parametrize(
    ("pace", "step", "total", "expected"),
    [(2.0, 12, 60, 96.0), (2.0, 61, 60, 0.0), (None, 1, 60, None), (2.0, 1, None, None)],
)
def test_remaining_time_is_step_time_times_remaining_steps(
    pace: float | None, step: int, total: int | None, expected: float | None
) -> None:
    assert present.time_left_s(pace, step, total) == expected


def test_commit_times_are_means_of_the_newest_commits() -> None:
    assert present.commit_times([]) == (None, None)
    old = [commit(99.0, 50.0)]
    new = [commit(1.0, 0.1), commit(3.0, 0.2), commit("x"), commit(2.0), commit(1.0)]
    assert present.commit_times([*old, *new]) == (3.0, 0.2)


@pytest.mark.parametrize(("event", "expected"), [(ready(0), 40.0), (ready(0, seconds=9.5), 9.5)])
def test_start_time_lasts_until_the_ready_event(event: dict[str, Any], expected: float) -> None:
    assert present.start_time_s(60.0, [event]) == expected
    assert present.start_time_s(60.0, []) is None


@pytest.mark.parametrize(
    ("trained", "first", "until", "expected"),
    [
        (90.0, 100.0, 200.0, 0.9),
        (None, 100.0, 200.0, None),
        (90.0, None, 200.0, None),
        (90.0, 100.0, None, None),
        (90.0, 100.0, 100.0, None),
        (90.0, 100.0, 150.0, 1.0),
    ],
)
def test_effective_ratio_is_training_time_over_elapsed_time(
    trained: float | None, first: float | None, until: float | None, expected: float | None
) -> None:
    assert present.effective_ratio(trained, first, until) == expected


def test_effective_ratio_is_right_after_two_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two starts; the first was ready for steps 100 s before the end, and 80 s went into steps."""
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    run = FakeRun(tmp_path)
    run.submission()
    run.begin(job="1.0.0")
    now[0] = 1010.0
    run.event("master.1", "ready", step=0)
    run.begin(job="2.0.0")
    now[0] = 1090.0
    run.event("master.2", "ready", step=1)
    run.metrics(*lines(60.0, 20.0))
    run.say(2, step=2, time=1110.0, tasks={})
    running = {"alive": True}
    detailed = assemble(snapshot.read(run.paths, snapshot.DETAILED), [], **running)
    assert detailed["timing"]["effective_ratio"] == pytest.approx(0.8)
    assert assemble(snapshot.read(run.paths), [], **running)["timing"]["effective_ratio"] is None
    monkeypatch.setattr(snapshot, "MOST_METRICS_BYTES", 10)
    large = assemble(snapshot.read(run.paths, snapshot.DETAILED), [], **running)
    assert large["timing"]["effective_ratio"] is None
