"""A local run uses the code copy of its submission, and nothing writes to the copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.held import NO_LIMIT, Hold
from tests.support.own_reward import NAME, rewards, write_reward
from tests.support.rotation import SNAPSHOTS, in_turn
from tests.support.trials import Site, kill_one, ppo_config


@pytest.mark.long
@in_turn(0, SNAPSHOTS)
def test_edits_reach_a_run_only_with_update_code(tmp_path: Path) -> None:
    site = Site(tmp_path)
    write_reward(tmp_path, 1.0)
    hold = Hold(site)
    hold.allow(2)
    parts = {"held": {**hold.reward("ppo/1"), "weight": 0}, "own": {"name": NAME}}
    config = ppo_config(total_steps=6, evaluation=None, reward={"parts": parts})
    site.slurmrl("submit", str(site.write("ppo.yaml", config)), "--scheduler", "local", "--detach")
    site.wait_for_step("ppo/1", 2)
    write_reward(tmp_path, 0.25)
    kill_one(site.paths("ppo/1").run, "worker")  # the next process repeats all imports
    hold.allow(NO_LIMIT)
    assert site.wait_for_end("ppo/1")["state"] == "COMPLETED"
    assert site.status("ppo/1")["incarnation"] >= 2
    assert set(rewards(site.metrics("ppo/1")).values()) == {1.0}
    (site.paths("ppo/1").code / "slurmrl" / "of_another_version.py").touch()
    refused = site.slurmrl("submit", "ppo.yaml", "total_steps=8", "--scheduler", "local", code=2)
    assert "was submitted with another version of slurmrl" in refused.stderr
    kept = site.slurmrl("resume", "ppo/1", "total_steps=8", "--wait")
    assert "using the trial's slurmrl" in kept.stderr
    updated = site.slurmrl("resume", "ppo/1", "total_steps=10", "--update-code", "--wait")
    assert "runs the current code" in updated.stdout
    found = rewards(site.metrics("ppo/1"))
    assert [found[step] for step in range(6, 11)] == [1.0, 1.0, 1.0, 0.25, 0.25]
    assert not list(site.paths("ppo/1").run.rglob("__pycache__"))  # snapshots stay as submitted
