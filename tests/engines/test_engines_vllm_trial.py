"""A whole trial that generates with a real vLLM server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.engines.test_engines_sglang_trial import REWARD
from tests.support.trials import ARCHITECTURE, REPOSITORY, Site, processes, sft_config, wait_until

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="no vLLM: run scripts/test-engines")
STEPS = 12


def test_the_server_of_a_trial_holds_the_weights_of_every_step(tmp_path: Path) -> None:
    """Its log-probabilities stay those of the training engine."""
    site = Site(tmp_path, {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(REPOSITORY)))})
    (tmp_path / "reward_of_mine.py").write_text(REWARD)
    config = sft_config(
        experiment="grpo",
        total_steps=STEPS,
        algorithm={"name": "grpo", "batch_size": 8, "n_minibatches": 1},
        rollout={
            "backend": "vllm:d1",
            "gpus": "0",
            "python": PYTHON,
            "n": 4,
            "max_new_tokens": 8,
            "server_silence_s": 60.0,
        },
        reward={"name": "reward_of_mine:different"},
    )
    config["actor"]["architecture"] = {**ARCHITECTURE, "hidden_size": 64}  # heads of 32
    config["actor"]["optimizer"] = {"lr": 1e-2}
    config["dataset"]["type"] = "prompt"
    path = site.write("grpo.yaml", config)
    site.slurmrl("submit", str(path), "--scheduler", "local")
    run = site.paths("grpo/1").run
    status = site.wait_for_end("grpo/1", timeout_s=600.0)
    assert status["state"] == "COMPLETED"
    assert status["incarnation"] == 1
    lines = site.metrics("grpo/1")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert min(line["actor_grad_norm"] for line in lines) > 0.0, "every step changes the weights"
    assert max(abs(line["mismatch/kl"]) for line in lines) < 1e-5
    assert max(line["mismatch/ratio_max"] for line in lines) < 1.001
    wait_until("the end of all processes", lambda: not any(processes(run).values()))
