"""Whole trials whose ranks share matrices or sequences have the numbers of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.test_local_elastic import assert_close, config_of
from tests.support.trials import Site


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sft", "ppo"])
def test_a_trial_learns_the_same_on_tensor_and_context_ranks(tmp_path: Path, kind: str) -> None:
    site = Site(tmp_path)
    found = {}
    for layout in ("d1", "t2", "c2"):
        config = config_of(kind, trial=layout, total_steps=6)
        if kind == "ppo":
            # A random model never answers correctly; all numbers would be rounding errors.
            config["algorithm"] |= {"reward_bias": 1.0, "mask_no_eos_with_zero": True}
        config["actor"]["backend"] = f"fsdp:{layout}"
        if layout == "t2":
            config["actor"]["model"] = {"sequence_parallel": True}
        file = site.write(f"{layout}.yaml", config)
        site.slurmrl("submit", str(file), "--scheduler", "local", "--wait")
        found[layout] = site.metrics(f"{kind}/{layout}")
    assert_close(found["t2"], found["d1"])
    assert_close(found["c2"], found["d1"])
    site.slurmrl("resume", f"{kind}/c2", "actor.backend=fsdp:t2", "total_steps=8", "--wait")
    assert site.metrics(f"{kind}/c2")[-1]["step"] == 8
