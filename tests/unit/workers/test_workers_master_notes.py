"""Tests of messages of the master about data and conditions, each of which is logged once."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from slurmrl.config.schema.config import StopWhen
from slurmrl.errors import ConfigError, Problem
from slurmrl.workers.master import __main__
from slurmrl.workers.master.master import Master
from slurmrl.workers.messages import HeldOut, Ready


class Events:
    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []

    def write(self, kind: str, **values: Any) -> None:
        self.said.append((kind, values))


def test_dropped_lines_are_reported_by_file(caplog: pytest.LogCaptureFixture) -> None:
    config = SimpleNamespace(
        dataset=SimpleNamespace(title="/train"),
        evaluations={"held": SimpleNamespace(held_out=SimpleNamespace(title="/held"))},
    )
    master: Any = SimpleNamespace(config=config, events=Events())
    held_out = (HeldOut(suite="held", size=4),)
    ready = Ready(rank=0, size=7, fingerprint="f", left_out=3, held_out=held_out)
    with caplog.at_level(logging.WARNING):
        Master._tell_left_out(master, ready)
    assert master.rows_left_out == 3
    assert master.events.said == [("left_out", {"file": "/train", "rows": 3, "of": 10})]
    assert "3 of 10 lines of /train are too long" in caplog.text


@pytest.mark.parametrize(
    ("condition", "lines", "told"),
    [
        ("rewrad >= 1", [{"step": 0, "eval/reward": 1.0}], False),
        ("rewrad >= 1", [{"step": 1, "reward": 1.0}, {"step": 2, "reward": 1.0}], True),
        ("eval/rewrad >= 1", [{"step": 1, "reward": 1.0}], False),
        ("eval/rewrad >= 1", [{"step": 1, "eval/reward": 1.0}], True),
        ("reward >= 1", [{"step": 1, "reward": 0.0}], False),
    ],
)
def test_stop_condition_on_a_missing_metric_is_reported_once(
    condition: str, lines: list[dict[str, Any]], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    progress = SimpleNamespace(stop_when=StopWhen.parse(condition))
    master: Any = SimpleNamespace(progress=progress, events=Events())
    master._told_unknown = master._saw_metric = False
    with caplog.at_level(logging.WARNING):
        for line in lines:
            Master._tell_unknown_metric(master, line)
    assert [kind for kind, _ in master.events.said] == ["no_such_metric"] * told
    assert ("did you mean" in caplog.text) is told


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([{"step": 1}, {"step": 2}], 2),
        ([{"step": 1}, {"step": 2, "brief": 0.5}, {"step": 3}], 1),
        ([{"step": 1, "brief": 0.5}, {"step": 2}], 0),
    ],
)
def test_end_of_run_reports_metric_that_never_appeared(
    lines: list[dict[str, Any]], told: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The first report is about one step; the last is about the run."""
    progress = SimpleNamespace(step=3, stop_when=StopWhen.parse("brief >= 1"))
    checkpoint = SimpleNamespace(export_at_end=False)
    master: Any = MagicMock(progress=progress, config=SimpleNamespace(checkpoint=checkpoint))
    master.events, master._told_unknown, master._saw_metric = Events(), False, False
    with caplog.at_level(logging.WARNING):
        for line in lines:
            Master._tell_unknown_metric(master, line)
        Master._finish(master, "total_steps")
    said = [kind for kind, _ in master.events.said]
    assert said.count("no_such_metric") == told
    assert (
        "no step since the last start had the metric of stop_when: brief >= 1" in caplog.text
    ) is (told == 2)


def test_user_error_is_logged_without_traceback(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(__main__, "publish", lambda *_: True)
    events: Any = Events()
    names: Any = None
    error = ConfigError((Problem("ppo.yaml:3", "seed", "is wrong"),))
    failure = __main__._fail(names, 1, events, error)
    assert failure.final
    assert "ppo.yaml:3: seed: is wrong" in caplog.text
    assert "Traceback" not in capsys.readouterr().err
