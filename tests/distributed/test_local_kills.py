"""A local trial that loses any one process ends like one that was left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.trials import Site, kill_one, ppo_config, sft_config

CONFIGS: dict[str, Callable[..., dict[str, Any]]] = {"sft": sft_config, "ppo": ppo_config}
STEPS = {"sft": 60, "ppo": 20}
"""Enough that a run has not ended when it is killed at its third step."""


def config_of(kind: str) -> dict[str, Any]:
    return CONFIGS[kind](total_steps=STEPS[kind], checkpoint={"every_steps": 2})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Outcome of an undisturbed run, computed once per algorithm."""
    outcomes: dict[str, dict[str, Any]] = {}

    def outcome(kind: str) -> dict[str, Any]:
        if kind not in outcomes:
            site = Site(tmp_path_factory.mktemp(f"undisturbed-{kind}"))
            config = site.write("config.yaml", config_of(kind))
            site.slurmrl("submit", str(config), "--scheduler", "local", "--wait")
            outcomes[kind] = site.outcome(f"{kind}/1")
        return outcomes[kind]

    return outcome


long = pytest.mark.long


@pytest.mark.parametrize(
    ("kind", "role", "index"),
    [
        ("ppo", "worker", 1),
        ("sft", "master", 0),
        pytest.param("ppo", "worker", 0, marks=long),
        pytest.param("ppo", "master", 0, marks=long),
        pytest.param("ppo", "agent", 0, marks=long),
        pytest.param("ppo", "supervisor", 0, marks=long),
        pytest.param("sft", "worker", 0, marks=long),
        pytest.param("sft", "agent", 0, marks=long),
    ],
)
def test_run_goes_on_by_itself(
    tmp_path: Path,
    undisturbed: Callable[[str], dict[str, Any]],
    kind: str,
    role: str,
    index: int,
) -> None:
    site = Site(tmp_path)
    trial = f"{kind}/1"
    config = site.write("config.yaml", config_of(kind))
    site.slurmrl("submit", str(config), "--scheduler", "local", "--detach")
    site.wait_for_step(trial, 3)
    kill_one(site.paths(trial).run, role, index)
    status = site.wait_for_end(trial)
    assert status["state"] == "COMPLETED"
    assert status["step"] == STEPS[kind]
    assert status["incarnation"] >= 2
    assert site.outcome(trial) == undisturbed(kind)


def test_chain_killed_resume_finishes(
    tmp_path: Path, undisturbed: Callable[[str], dict[str, Any]]
) -> None:
    site = Site(tmp_path)
    config = site.write("config.yaml", config_of("sft"))
    site.slurmrl("submit", str(config), "--scheduler", "local", "--detach")
    site.wait_for_step("sft/1", 3)
    kill_one(site.paths("sft/1").run, "chain")
    assert site.wait_for_end("sft/1")["state"] == "INTERRUPTED"
    site.slurmrl("resume", "sft/1", "--wait")
    assert site.status("sft/1")["state"] == "COMPLETED"
    assert site.outcome("sft/1") == undisturbed("sft")
