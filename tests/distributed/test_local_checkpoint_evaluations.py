"""Separate trials evaluate checkpoints while training continues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmrl.run import metrics
from slurmrl.run.paths import RunPaths
from tests.support.held import NO_LIMIT, Hold
from tests.support.rotation import EVALUATIONS, in_turn
from tests.support.trials import ADDITION, Site, kill_one, ppo_config, wait_until

SAMPLES, COMPLETIONS = 16, 2


@pytest.mark.long
@in_turn(1, EVALUATIONS)
@pytest.mark.timeout(1800)
def test_each_checkpoint_is_evaluated_once_despite_kills(tmp_path: Path) -> None:
    """The trainers neither evaluate nor wait. An evaluation continues after its worker was killed.
    Its results are in the trial's metrics once, at the step of the checkpoint.
    """
    site = Site(tmp_path)
    evaluation = {
        "dataset": {"type": "prompt", "path": str(ADDITION / "heldout.jsonl")},
        "samples": SAMPLES,
        "n": COMPLETIONS,
        "pass_score": 1,
        "tasks": {"backend": "fsdp:d1"},
    }
    config = ppo_config(
        total_steps=4, trial="1", evaluation=evaluation, logging={"tensorboard": True}
    )
    hold = Hold(site)
    hold.allow(4)  # evaluations wait after the fourth step
    file = site.write("config.yaml", hold.judged(config, "HeldMatch"))
    site.slurmrl("submit", str(file), "--scheduler", "local", "--wait")
    paths = site.paths("ppo/1")
    trials = [f"ppo-eval/ppo-1-step-{step}" for step in (2, 4)]
    kill_one(site.paths(trials[1]).run, "worker")
    hold.allow(NO_LIMIT)
    for trial in trials:
        assert site.wait_for_end(trial)["state"] == "COMPLETED"
    for step, line in zip((2, 4), metrics.read_evaluated(paths), strict=True):
        assert line["step"] == step
        assert {"eval/reward", "eval/reward/low", "eval/pass@2", "eval/maj@2"} <= line.keys()
    summaries = [json.loads(site.paths(trial).summary.read_bytes()) for trial in trials]
    assert [summary["items"] for summary in summaries] == [SAMPLES, SAMPLES]
    own = site.metrics("ppo/1")
    assert not [name for line in own for name in line if name.startswith("eval/")]
    merged = metrics.all_lines(paths)
    assert [line["step"] for line in merged] == [1, 2, 3, 4]
    for step, summary in zip((2, 4), summaries, strict=True):
        for name, metric in (("avg@2", "reward"), ("pass@2", "pass@2")):
            assert merged[step - 1][f"eval/{metric}"] == summary["estimates"][name]["value"]
    assert "eval/pass@2" in site.status("ppo/1")["metrics"]
    wait_until("both results in TensorBoard's files", lambda: arrived(paths) == ["2", "4"])
    wait_until("the checkpoints to be let go", lambda: not [*paths.being_evaluated.iterdir()])


def arrived(paths: RunPaths) -> list[str]:
    """Return the steps that have arrived after the end of training."""
    return sorted(path.name.rpartition("-")[2] for path in paths.arrived_tensorboard.glob("*"))
