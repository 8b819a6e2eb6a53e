"""Whole trials whose actor generates in a layout of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_local_elastic import assert_close, config_of
from tests.distributed.test_local_layouts import REWARDED
from tests.distributed.test_local_megatron import let_megatron_compute_here
from tests.support.trials import Site


def run(site: Site, trial: str, **sections: Any) -> list[dict[str, Any]]:
    """The metrics of a PPO trial of three steps; ``sections`` update those of the configuration."""
    config = config_of("ppo", trial=trial, total_steps=3)
    config["algorithm"] |= REWARDED
    for name, section in sections.items():
        config[name] = config.get(name, {}) | section
    file = site.write(f"{trial}.yaml", config)
    site.slurmrl("submit", str(file), "--scheduler", "local", "--wait")
    return site.metrics(f"ppo/{trial}")


def test_generation_on_ranks_of_its_own(tmp_path: Path) -> None:
    """The actor trains on two tensor ranks and generates on two copies, which the reference shares:
    the numbers are those of one rank."""
    site = Site(tmp_path)
    found = run(
        site,
        "apart",
        actor={"backend": "fsdp:t2"},
        critic={"backend": "fsdp:d2"},
        ref={"backend": "fsdp:d2", "gpus": "2-3"},
        rollout={"backend": "native:d2", "gpus": "2-3"},
    )
    assert_close(found, run(site, "one"))


@pytest.mark.long
def test_an_actor_on_megatron_generates(tmp_path: Path) -> None:
    """All models on the same four ranks, the actor on tensor ranks and stages of megatron: the
    numbers are those of one fsdp rank."""
    site = Site(tmp_path)
    found = run(
        site,
        "mixed",
        actor={"backend": "megatron:t2p2", "model": {"make_vocab_size_divisible_by": 1}},
        critic={"backend": "fsdp:d2t2"},
        ref={"backend": "fsdp:d4"},
        rollout={"backend": "native:d4"},
        cluster=let_megatron_compute_here(site, tmp_path, "mixed", "ppo"),
    )
    assert_close(found, run(site, "one"))
