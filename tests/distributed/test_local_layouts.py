"""Whole trials whose ranks share matrices or sequences have the numbers of one rank."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.test_local_elastic import assert_close, config_of
from tests.support.trials import Site

REWARDED = {"reward_bias": 1.0, "mask_no_eos_with_zero": True}
"""A random model never answers correctly; all numbers would be rounding errors."""


def test_models_with_layouts_and_ranks_of_their_own(tmp_path: Path) -> None:
    """The actor on two tensor ranks, the critic on two data-parallel ones, the reference on the
    second rank alone: the numbers are those of one rank.
    """
    site = Site(tmp_path)
    layouts = {
        "one": {"actor": {"backend": "fsdp:d1"}},
        "mixed": {
            "actor": {"backend": "fsdp:t2"},
            "critic": {"backend": "fsdp:d2"},
            "ref": {"backend": "fsdp:d1", "gpus": "1"},
        },
    }
    for trial, roles in layouts.items():
        config = config_of("ppo", trial=trial, total_steps=3)
        config["algorithm"] |= REWARDED
        for role, section in roles.items():
            config[role] = config.get(role, {}) | section
        file = site.write(f"{trial}.yaml", config)
        site.slurmrl("submit", str(file), "--scheduler", "local", "--wait")
    assert_close(site.metrics("ppo/mixed"), site.metrics("ppo/one"))
