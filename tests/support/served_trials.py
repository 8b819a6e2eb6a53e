"""Short GRPO trials whose completions come from servers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.support.trials import REPOSITORY, Site, sft_config

REWARD = """
def different(prompts, completions, rows):
    return [float(len(set(completion))) for completion in completions]
"""


def site_with_reward(folder: Path) -> Site:
    """A site whose trials find their reward in ``folder``."""
    (folder / "reward_of_mine.py").write_text(REWARD)
    return Site(folder, {"PYTHONPATH": os.pathsep.join((str(folder), str(REPOSITORY)))})


def grpo(rollout: dict[str, Any], *, batch_size: int = 4, **changes: Any) -> dict[str, Any]:
    """The configuration of a trial; ``rollout`` says where the servers are."""
    config = sft_config(
        experiment="grpo",
        algorithm={"name": "grpo", "batch_size": batch_size, "n_minibatches": 1},
        rollout={"n": 4, "max_new_tokens": 6, **rollout},
        reward={"name": "reward_of_mine:different"},
        **changes,
    )
    config["actor"]["optimizer"] = {"lr": 1e-2}
    config["dataset"] = {**config["dataset"], "type": "prompt", "max_prompt_tokens": 16}
    return config
