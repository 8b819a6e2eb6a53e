"""Tests of the calls of the newest steps that the master records."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmrl.plan.model import CallPlan
from slurmrl.workers.master import publish
from slurmrl.workers.master.publish import EVERY_S, STEPS, Answers, Timeline
from slurmrl.workers.messages import Done


def answers(step: int) -> Answers:
    """Return the answers of three ranks, of which the last takes no part in the call."""
    return {
        rank: Done(rank=rank, seq=0, began=100.0 * step + rank, seconds=0.5, peak_bytes=step - rank)
        for rank in range(3)
    }


def test_timeline_keeps_newest_steps_and_is_written_periodically(
    tmp_path: Path, calls: Callable[..., CallPlan]
) -> None:
    now = [0.0]
    path = tmp_path / "timeline.json"
    kept = Timeline(path, lambda: now[0])

    def written() -> list[dict[str, Any]]:
        steps: list[dict[str, Any]] = json.loads(path.read_text())["steps"]
        return steps

    train = calls("train", ranks=(0, 1))
    for step in range(1, STEPS + 5):
        kept.add(step, [(train, answers(step))])
    assert [one["step"] for one in written()] == [1], "not at each step"
    now[0] = EVERY_S
    kept.add(99, [(train, answers(3))])
    assert [one["step"] for one in written()] == [*range(6, STEPS + 5), 99]
    assert written()[-1]["calls"] == [
        {"name": "train", "ranks": [[0, 300.0, 0.5], [1, 301.0, 0.5]]}
    ]
    most = STEPS + 4
    assert json.loads(path.read_text())["peaks"] == [[0, most], [1, most - 1], [2, most - 2]]


def test_timeline_size_is_limited_and_write_errors_are_ignored(
    tmp_path: Path, calls: Callable[..., CallPlan]
) -> None:
    many = range(publish.MOST_RANKS + 1)
    wide: Answers = {rank: Done(rank=rank, seq=0, seconds=1.0, peak_bytes=1) for rank in many}
    path = tmp_path / "timeline.json"
    answered = [(calls("train", ranks=tuple(many)), wide)] * (publish.MOST_CALLS + 1)
    Timeline(path).add(1, answered)
    found = json.loads(path.read_text())
    assert len(found["steps"][0]["calls"]) == publish.MOST_CALLS
    assert len(found["steps"][0]["calls"][0]["ranks"]) == publish.MOST_RANKS
    assert len(found["peaks"]) == publish.MOST_RANKS
    Timeline(path / "not-a-directory" / "file").add(1, answered)
