"""Pictures of the documentation that scripts/make-docs makes from trials."""

from __future__ import annotations

import importlib
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from slurmrl.run.history.slots import Kind
from tests.fake_runs import FakeRun
from tests.support import browser

ROOT = Path(__file__).parents[3]
LARGEST = 150_000
"""Bytes of a picture."""


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("example_curves")


def trial(root: Path, experiment: str, scores: list[float], *, ended: bool) -> FakeRun:
    run = FakeRun(root, experiment=experiment)
    run.submission()
    run.begin(job="41.0.0")
    rows = ({"step": step, "eval/reward": y, "loss": 1 - y} for step, y in enumerate(scores))
    run.metrics({"step": 1, "eval/reward": 0.9, "loss": float("nan")}, *rows)
    if ended:
        run.end(Kind.FINISHED, step=len(scores) - 1)
    return run


def test_curves_keep_last_values_of_completed_trials(tmp_path: Path, curves: Any) -> None:
    trial(tmp_path, "addition-sft", [0.0, 0.25, 0.5], ended=True)
    trial(tmp_path, "addition-distill", [0.0, 0.5], ended=False)
    (file,) = curves.keep(tmp_path, tmp_path / "kept")
    data = json.loads(file.read_text())
    assert data["metrics"]["eval/reward"] == [[0, 0.0], [1, 0.25], [2, 0.5]]
    picture = curves.picture("title", [["eval/reward"], ["loss"]], data["metrics"])
    lines = [
        element.attrib["d"].removeprefix("M").split(" L")
        for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}path")
        if element.attrib.get("stroke-width")
    ]
    heights = [[float(point.split()[1]) for point in line] for line in lines]
    assert heights[0][0] - heights[0][1] == pytest.approx(heights[0][1] - heights[0][2], abs=0.2)
    assert heights[0] == sorted(heights[0], reverse=True)
    assert heights[1] == sorted(heights[1])


@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium")
def test_screens_show_status_and_report_of_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    screenshots = importlib.import_module("screenshots")
    trial(tmp_path, "addition-sft", [0.0, 0.25, 0.5], ended=True)
    status, *reports = screenshots.take(tmp_path, "addition-sft/1", tmp_path / "pictures")
    words = "".join(ElementTree.fromstring(status.read_text()).itertext())
    assert "addition-sft/1  COMPLETED" in words
    assert str(tmp_path) not in words
    assert [file.read_bytes()[8:12] for file in reports] == [b"WEBP", b"WEBP"]
    assert reports[0].read_bytes() != reports[1].read_bytes()


def test_pictures_of_pages_are_small() -> None:
    files = [path for path in (ROOT / "docs" / "pictures").rglob("*") if path.is_file()]
    assert {file.name: file.stat().st_size for file in files if file.stat().st_size > LARGEST} == {}
