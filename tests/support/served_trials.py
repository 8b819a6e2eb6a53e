"""Short GRPO trials whose completions come from servers."""

from __future__ import annotations

from typing import Any

from tests.support.trials import sft_config


def grpo(rollout: dict[str, Any], *, batch_size: int = 4, **changes: Any) -> dict[str, Any]:
    """Return the configuration of a trial. ``rollout``: the place of the servers."""
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
