"""The addition examples learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.rotation import rotating
from tests.support.trials import REPOSITORY, Site

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def evaluations(lines: list[dict[str, Any]]) -> list[float]:
    return [line["eval/reward"] for line in lines if "eval/reward" in line]


@pytest.mark.parametrize("names", rotating(("sft",), ("sft", "ppo")))
def test_addition_example_learns(tmp_path: Path, names: tuple[str, ...]) -> None:
    """SFT reaches its expected accuracy. PPO raises the reward of its model in 12 steps."""
    site = Site(tmp_path)
    for name in names:
        config = str(REPOSITORY / "examples" / f"{name}.yaml")
        steps = () if name == "sft" else ("total_steps=12", "algorithm.batch_size=512")
        site.slurmrl("submit", config, *steps, "--scheduler", "local", "--wait", timeout_s=1500)
    start = evaluations(site.metrics("addition-sft/1"))
    assert start[-1] >= 0.4, "SFT stops at its mark"
    assert len(site.metrics("addition-sft/1")) < 600
    if "ppo" in names:
        rewards = evaluations(site.metrics("addition-ppo/1"))
        assert rewards[-1] >= rewards[0] + 0.15, rewards
