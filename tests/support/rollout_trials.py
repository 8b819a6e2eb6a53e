"""Short GRPO trials whose completions rollout tasks may make."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.distributed.engines.one_process import random_model
from tests.support.trials import ARCHITECTURE, REPOSITORY, Site, command_line, processes, sft_config

REWARD = """
import time
from pathlib import Path

def different(prompts, completions, rows):
    if not Path({hurry!r}).exists():
        time.sleep({pause_s})  # so that the trial still runs when it is disturbed
    return [float(len(set(completion))) for completion in completions]
"""
STEPS = 14
BATCH = 8


def site_in(folder: Path, environment: Mapping[str, str], pause_s: float = 0.3) -> Site:
    """Return a site whose trials have a reward in ``folder``, which pauses until `hurry`."""
    code = REWARD.format(hurry=str(folder / "hurry"), pause_s=pause_s)
    (folder / "reward_of_mine.py").write_text(code)
    path = os.pathsep.join((str(folder), str(REPOSITORY)))
    return Site(folder, {"PYTHONPATH": path, **environment})


def hurry(site: Site) -> None:
    """Let the site's trials continue without pauses."""
    (site.folder / "hurry").touch()


def config_of(trial: str, tasks: dict[str, Any] | None) -> dict[str, Any]:
    config = sft_config(
        experiment="grpo",
        trial=trial,
        total_steps=STEPS,
        algorithm={"name": "grpo", "batch_size": BATCH, "n_minibatches": 1},
        ref={},
        rollout={"n": 4, "max_new_tokens": 8, **({} if tasks is None else {"tasks": tasks})},
        reward={"name": "reward_of_mine:different"},
        checkpoint={"every_steps": 2},
    )
    config["actor"]["optimizer"] = {"lr": 1e-2}
    config["dataset"]["type"] = "prompt"
    return config


def train_adapters(config: dict[str, Any], source: Path, **architecture: Any) -> None:
    """Let the actor of a trial train adapters of the model in ``source``."""
    if not source.exists():
        random_model(source, {**ARCHITECTURE, **architecture})
    config["actor"] |= {"architecture": None, "path": str(source), "lora": {"rank": 2}}


def of_group(site: Site, trial: str, role: str, group: str) -> list[int]:
    """Return the processes of a role that work for a group."""
    return [
        pid
        for pid in processes(site.paths(trial).run)[role]
        if any(word.partition("/")[0] == group for word in command_line(pid))
    ]


def last_ledger(site: Site, trial: str) -> dict[str, Any]:
    """Return the ledger of the last checkpoint."""
    last = max(site.paths(trial).checkpoints.glob("step-*/state.json"))
    ledger: dict[str, Any] = json.loads(last.read_bytes())["ledger"]
    return ledger


def trained(site: Site, trial: str) -> int:
    """Return the number of items that the last checkpoint has trained."""
    ledger = last_ledger(site, trial)
    first: int = ledger["settled"]
    dropped = sum(one["items"] for one in ledger.get("dropped_before", ()))
    behind = [
        item for one in ledger.get("trained", ()) for item in range(one["first"], one["stop"])
    ]
    to_come = [one["item"] for one in ledger.get("samples", ())]
    to_come += [item for lease in ledger.get("leased", ()) for item in lease["items"]]
    assert all(item >= first for item in behind + to_come)
    assert len({*behind, *to_come}) == len(behind) + len(to_come), "each has one state"
    return first - dropped + len(behind)
