"""Trials whose actor is a model of transformers, and whose completions come from a real server on a
CPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import check_served
from tests.support.trials import Site, sft_config

STEPS = 3
SIZES = {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
STACKED = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
"""Transformers stacks experts that its files have one by one."""
WINDOWS = {
    "model_type": "gemma3_text",
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
"""vLLM takes no new experts on CPUs; this family the built-in decoder does not run."""
REWARD = """
def different(prompts, completions, rows):
    return [float(len(set(text))) for text in completions]
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("server", "family", "tensor_ranks"), [("sglang", STACKED, 2), ("vllm", WINDOWS, 1)]
)
def test_server_samples_with_weights_of_a_model_of_transformers(
    tmp_path: Path, server: str, family: dict[str, Any], tensor_ranks: int
) -> None:
    """Log-probabilities equal the trainers', even after two updates of all weights and with tensor
    ranks.
    """
    python = os.environ.get(f"{server.upper()}_PYTHON", "")
    if not python:
        pytest.skip(f"no {server}: run scripts/test-engines")
    (tmp_path / "reward_of_mine.py").write_text(REWARD)
    site = Site(tmp_path)
    config = sft_config(
        experiment="grpo",
        total_steps=STEPS,
        algorithm={"name": "grpo", "batch_size": 4, "n_minibatches": 1},
        rollout={
            "backend": f"{server}:d1",
            "gpus": str(tensor_ranks),
            "python": python,
            "n": 4,
            "max_new_tokens": 8,
        },
        reward={"name": "reward_of_mine:different"},
    )
    config["actor"] |= {
        "architecture": {**SIZES, **family},
        "implementation": "hf",
        "backend": f"fsdp:d1t{tensor_ranks}",
        "optimizer": {"lr": 1e-2},
    }
    config["dataset"]["type"] = "prompt"
    path = site.write("grpo.yaml", config)
    site.slurmrl("submit", str(path), "--scheduler", "local", "--detach")
    assert site.wait_for_end("grpo/1", timeout_s=500.0)["state"] == "COMPLETED"
    check_served(site.metrics("grpo/1"), STEPS)
