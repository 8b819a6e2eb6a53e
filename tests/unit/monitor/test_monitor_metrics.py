from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from slurmrl.config.schema import Logging
from slurmrl.desk.report.report_data import Curve, curves
from slurmrl.fsio import documents
from slurmrl.run import metrics
from slurmrl.run.paths import RunPaths
from slurmrl.watch.sinks import MetricsRecorder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def write(path: Path, *steps: int) -> None:
    writer = metrics.MetricsWriter(path)
    for step in steps:
        writer.write({"step": step, "reward": step / 8})
    writer.sync()


def steps(path: Path) -> list[int]:
    return [line["step"] for line in metrics.read(path)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_metrics_json_contains_no_nan(path: Path, value: float) -> None:
    metrics.MetricsWriter(path).write({"step": 1, "loss": value})
    assert json.loads(path.read_text()) == {"step": 1, "loss": None}


def test_incomplete_line_is_ignored(path: Path) -> None:
    write(path, 1, 2)
    path.write_bytes(path.read_bytes()[:-1])
    assert steps(path) == [1]
    assert metrics.read_latest(path, 5) == [{"step": 1, "reward": 0.125}]


def test_line_after_an_incomplete_one_is_read(path: Path) -> None:
    write(path, 1, 2)
    with path.open("ab") as file:
        file.write(b'{"step": 3, "rew\n')
    write(path, 4)
    assert steps(path) == [1, 2, 4]


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("n", [0, 1, 3, 10_000])
def test_latest_lines_are_found_in_a_large_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, n: int, chunk: int
) -> None:
    monkeypatch.setattr(documents, "CHUNK_BYTES", chunk)
    write(path, *range(200))
    expected = list(range(200))[-n:] if n else []
    assert steps(path) == list(range(200))
    assert [line["step"] for line in metrics.read_latest(path, n)] == expected


def test_missing_file_has_no_lines(path: Path) -> None:
    assert metrics.read(path) == metrics.read_latest(path, 3) == []
    assert metrics.newest(metrics.read_latest(path, 9)) == {}
    metrics.cut(path, 3)
    assert not path.exists()


def test_newest_metrics_include_the_newest_evaluation(path: Path) -> None:
    writer = metrics.MetricsWriter(path)
    writer.write({"step": 0, "eval/reward": 0.1})
    writer.write({"step": 1, "reward": 0.3, "kl": 0.01})
    writer.write({"step": 2, "reward": 0.4, "eval/reward": 0.5})
    writer.write({"step": 3, "reward": 0.6})
    assert metrics.newest(metrics.read_latest(path, 9)) == {
        "step": 3,
        "reward": 0.6,
        "eval/reward": 0.5,
    }


def test_latest_evaluation_and_single_columns_skip_damaged_lines(path: Path) -> None:
    writer = metrics.MetricsWriter(path)
    writer.write({"step": 0, "eval/reward": 0.1, "time/total": 1.5})
    writer.write({"step": 1, "eval/reward": 0.2, "time/total": 1e-3, "a/time/total": 7.0})
    writer.write({"step": 2, "time/total": None})
    with path.open("ab") as file:
        file.write(b'{"step": 3, "time/tot\n')
    writer.write({"time/total": 2, "step": 3})
    assert metrics.read_evaluation(path, 4)["eval/reward"] == 0.2
    assert metrics.read_evaluation(path, 2) == {}
    assert list(metrics.read_values(path, "time/total")) == [1.5, 1e-3, 2.0]


@pytest.mark.parametrize(("last", "kept"), [(-1, []), (0, [0]), (2, [0, 1, 2]), (9, [0, 1, 2, 3])])
def test_metrics_file_loses_later_steps_and_an_incomplete_line_when_cut(
    path: Path, last: int, kept: list[int]
) -> None:
    write(path, 0, 1, 2, 3)
    with path.open("ab") as file:
        file.write(b'{"step": 4')
    metrics.cut(path, last)
    assert steps(path) == kept
    assert not path.read_bytes() or path.read_bytes().endswith(b"}\n")


def test_cut_drops_lines_of_an_older_master(path: Path) -> None:
    write(path, 1, 2, 9, 3, 4, 5)
    metrics.cut(path, 4)
    assert steps(path) == [1, 2, 3, 4]


def test_recorder_continues_after_the_last_commit(tmp_path: Path) -> None:
    """Lines of an older version have no time. The time is not a metric, and the caller's line stays
    unchanged.
    """
    paths = RunPaths(tmp_path)
    write(paths.metrics, 1, 2, 3)
    recorder = MetricsRecorder(paths, Logging(), last_step=2, clock=lambda: 1767225600.12345)
    line = {"step": 3, "reward": 1.0}
    recorder.write(line)
    recorder.sync()
    recorder.close()
    found = metrics.read(paths.metrics)
    assert [line["reward"] for line in found] == [0.125, 0.25, 1.0]
    assert [line.get("time") for line in found] == [None, None, 1767225600.123]
    assert curves(found) == {"reward": Curve(x=[1, 2, 3], y=[0.125, 0.25, 1.0])}
    assert line == {"step": 3, "reward": 1.0}
