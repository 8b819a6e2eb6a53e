"""Trials of algorithms that learn from scored or labeled answers, and of algorithms with an
additional model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.rotation import in_turn
from tests.support.trials import ADDITION, ARCHITECTURE, Site, ppo_config, sft_config

TOKENIZER = str(ADDITION / "tokenizer")


def data(kind: str, name: str) -> dict[str, Any]:
    return {"type": kind, "path": str(ADDITION / f"{name}.jsonl")}


def run(site: Site, name: str, config: dict[str, Any], *overrides: str) -> list[dict[str, Any]]:
    file = site.write(f"{name}.yaml", {**config, "experiment": name})
    arguments = (*overrides, "--scheduler", "local", "--wait")
    site.slurmrl("submit", str(file), *arguments, timeout_s=600)
    return site.metrics(f"{name}/1")


@in_turn(0, 2)
def test_reward_model_is_trained_evaluated_and_used_for_scoring(tmp_path: Path) -> None:
    """The exported model scores completions of PPO.

    With ``total_steps=0``, its evaluation equals the last one of its training.
    """
    site = Site(tmp_path)
    config = sft_config(
        total_steps=2,
        algorithm={"name": "reward_model", "batch_size": 64},
        dataset=data("preference", "pairs"),
        evaluation={"dataset": data("preference", "heldout_pairs"), "samples": 64},
    )
    trained = run(site, "judge", config)
    assert trained[-1]["eval/accuracy"] > 0
    source = {"path": "trial:judge/1", "tokenizer": TOKENIZER, "backend": "fsdp:d2"}
    (evaluated,) = run(site, "again", {**config, "actor": source}, "total_steps=0")
    for name in ("eval/accuracy", "eval/margin", "eval/loss"):
        assert evaluated[name] == trained[-1][name]
    options = {"name": "model", "options": {"scale": 3.0, "bias": 1.0}}
    judged = ppo_config(total_steps=2, reward=options)
    judged |= {"reward_model": {"path": "trial:judge/1", "backend": "fsdp:d1"}}
    lines = run(site, "ppo", judged)
    for line in lines[1:]:
        assert abs(line["reward"] - 3.0 * (line["model_score"] - 1.0)) < 1e-5
    assert "eval/model_score" in lines[0]


@pytest.mark.long
@in_turn(1, 2)
def test_distillation_and_kto_run_with_frozen_models_in_other_layouts(tmp_path: Path) -> None:
    """The teacher of distillation and the reference of KTO are on one of two ranks."""
    site = Site(tmp_path)
    one = {"architecture": ARCHITECTURE, "backend": "fsdp:d1"}
    config = ppo_config(
        total_steps=2,
        algorithm={"name": "distill", "batch_size": 16},
        teacher={**one, "architecture": {**ARCHITECTURE, "hidden_size": 16}},
    )
    del config["critic"], config["ref"]
    lines = run(site, "distill", config)
    assert lines[1]["reverse_kl"] == pytest.approx(lines[1]["loss"], abs=1e-4)
    assert lines[1]["importance_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert lines[-1]["grad_norm"] > 0
    assert "eval/reverse_kl" in lines[0]
    config = sft_config(
        total_steps=2,
        algorithm={"name": "kto", "batch_size": 32},
        ref={"backend": "fsdp:d1"},
        dataset=data("kto", "sampled_labels"),
        evaluation={"dataset": data("kto", "sampled_labels"), "samples": 16},
    )
    lines = run(site, "kto", config)
    assert lines[1]["loss"] == 0.5, "the actor is the reference"
    assert lines[-1]["eval/loss"] != 0.5
