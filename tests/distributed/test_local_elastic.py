"""A trial that resumes with another number of ranks keeps its data order and optimizer state. Only
rounding differs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.rotation import rotating
from tests.support.trials import Site, is_timing, ppo_config, sft_config

CONFIGS: dict[str, Callable[..., dict[str, Any]]] = {"sft": sft_config, "ppo": ppo_config}
RELATIVE, ABSOLUTE = 1e-3, 1e-5


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    """Return settings for one rank. PPO has two minibatches on any number of ranks."""
    config = CONFIGS[kind](checkpoint={"every_steps": 2, "keep_last": 50}, **changes)
    config["actor"]["backend"] = "fsdp:d1"
    return config


def ledgers(site: Site, trial: str) -> dict[str, Any]:
    """The ledger and its dataset at each commit's step."""
    found = {}
    for folder in sorted(site.paths(trial).checkpoints.iterdir()):
        state = json.loads((folder / "state.json").read_bytes())
        found[state["step"]] = [state["ledger"], state["dataset"]]
    return found


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Compare metrics of two runs. The ``expected`` run may lack the evaluation that the other made
    at its end.
    """
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for mine, theirs in zip(found, expected, strict=True):
        names = {name for name in theirs if not is_timing(name)}
        more = {name for name in mine if not is_timing(name)} - names
        assert names <= set(mine)
        assert all(name.startswith("eval/") for name in more)
        for name in names:
            if isinstance(theirs[name], float):
                close = pytest.approx(theirs[name], rel=RELATIVE, abs=ABSOLUTE)
                assert mine[name] == close, f"{name} of step {mine['step']}"


def resume(site: Site, trial: str, ranks: int, *changes: str) -> str:
    """Resume with this number of ranks and train to the end. Return the output."""
    arguments = (f"actor.backend=fsdp:d{ranks}", *changes, "--wait")
    return site.slurmrl("resume", trial, *arguments).stdout


@pytest.mark.long
@pytest.mark.parametrize("kind", rotating("sft", "ppo"))
def test_trial_resumed_on_one_then_four_then_one_rank_matches_undisturbed(
    tmp_path: Path, kind: str
) -> None:
    site = Site(tmp_path)
    undisturbed = site.write("whole.yaml", config_of(kind, trial="whole", total_steps=6))
    site.slurmrl("submit", str(undisturbed), "--scheduler", "local", "--wait")
    first = site.write("elastic.yaml", config_of(kind, trial="elastic", total_steps=2))
    site.slurmrl("submit", str(first), "--scheduler", "local", "--wait")
    trial = f"{kind}/elastic"
    for ranks, steps in ((4, 4), (1, 6)):
        said = resume(site, trial, ranks, f"total_steps={steps}")
        assert f"-> 'fsdp:d{ranks}'" in said
        last = sorted(site.paths(trial).checkpoints.iterdir())[-1]
        assert len(list(last.glob("actor.*.safetensors"))) == ranks
    assert ledgers(site, trial) == ledgers(site, f"{kind}/whole")
    assert_close(site.metrics(trial), site.metrics(f"{kind}/whole"))
