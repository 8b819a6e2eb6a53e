"""The scores of evaluations during training, in trials whose processes are killed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from slurmrl.desk.report.report_data import of_step
from slurmrl.run.paths import RunPaths
from tests.support.evaluation_hooks import MASTER_STEP, SUITES, WORKER_STEP
from tests.support.hooks import hooked
from tests.support.rotation import EVALUATIONS, in_turn
from tests.support.trials import ADDITION, Site, is_timing, ppo_config

STEPS = 6
ITEMS = dict(zip(SUITES, (5, 4), strict=True))
COMPLETIONS = dict(zip(SUITES, (3, 2), strict=True))
KILLS = "tests.support.evaluation_hooks:processes_die_once"


def run(site: Site, code: Sequence[str] = ()) -> RunPaths:
    """Run a trial that evaluates its suites at each step and commits every second step."""
    own = {"dataset": {"type": "prompt", "path": str(ADDITION / "heldout.jsonl")}}
    other = {
        "dataset": {"type": "prompt", "path": str(ADDITION / "train.jsonl")},
        "reward": {"parts": {"right": {"name": "math"}, "same": {"name": "exact_match"}}},
        "samples": ITEMS[SUITES[1]],
        "n": COMPLETIONS[SUITES[1]],
        "pass_score": 2.0,
    }
    evaluation = {
        "suites": dict(zip(SUITES, (own, other), strict=True)),
        "samples": ITEMS[SUITES[0]],
        "n": COMPLETIONS[SUITES[0]],
        "every_steps": 1,
    }
    config = ppo_config(total_steps=STEPS, trial="1", evaluation=evaluation)
    config["code"] = list(code)
    file = site.write("config.yaml", config)
    site.slurmrl("submit", str(file), "--scheduler", "local", "--wait")
    return site.paths("ppo/1")


def content(paths: RunPaths) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in paths.evaluations.iterdir()}


@pytest.mark.long
@in_turn(2, EVALUATIONS)
@pytest.mark.timeout(1800)
def test_each_evaluation_has_one_score_file_despite_kills(tmp_path: Path) -> None:
    """The master is killed between the scores and the commit, and a rank after it has written its
    part. The evaluations are repeated and give the same bytes. The metrics equal the estimates in
    the files.
    """
    sites = [Site(tmp_path / name) for name in ("calm", "killed")]
    for site in sites:
        site.folder.mkdir()
    calm = run(sites[0])
    killed = run(sites[1], hooked(tmp_path, "1", "slurmrl.workers.messages", KILLS))
    steps = range(STEPS + 1)
    files = {calm.evaluation(step, suite).name for step in steps for suite in SUITES}
    assert content(calm).keys() == files
    assert content(killed) == content(calm)
    for step in steps:  # the completions that are kept, too
        kept, again = (of_step(paths.samples, step, evaluation=True) for paths in (calm, killed))
        assert kept == again != []
    written = calm.evaluation(MASTER_STEP, SUITES[-1])
    assert (tmp_path / "master").read_bytes() == written.read_bytes()
    assert (tmp_path / "worker").stat().st_size > 0, f"killed in step {WORKER_STEP}"
    assert list(killed.run.glob("parts/*")) == []
    lines = sites[1].metrics("ppo/1")
    assert without_times(lines) == without_times(sites[0].metrics("ppo/1"))
    for (step, line), suite in product(zip(steps, lines, strict=True), SUITES):
        found = json.loads(killed.evaluation(step, suite).read_bytes())
        items, n = ITEMS[suite], COMPLETIONS[suite]
        assert (found["step"], found["items"], len(found["scores"])) == (step, items, items)
        assert len({score["id"] for score in found["scores"]}) == items
        assert all(len(score["rewards"]) == n for score in found["scores"])
        for name, estimate in found["estimates"].items():
            ends = [line[f"eval/{suite}/{name}{end}"] for end in ("", "/low", "/high")]
            assert ends == list(estimate.values())
        assert {"reward", "pass@1", f"pass@{n}", f"maj@{n}"} <= found["estimates"].keys()
        assert (f"eval/{suite}/reward/right" in line) is (suite == SUITES[1])


def without_times(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: line[name] for name in line if not is_timing(name)} for line in lines]
