"""Trials of the algorithms that learn from judged answers, and of those with a further model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.trials import ADDITION, ARCHITECTURE, REPOSITORY, Site, ppo_config, sft_config

TOKENIZER = str(ADDITION / "tokenizer")
SHORT = ("dpo", "kto", "reward_model", "distill", "sft_chat")


def data(kind: str, name: str) -> dict[str, Any]:
    return {"type": kind, "path": str(ADDITION / f"{name}.jsonl")}


def run(site: Site, name: str, config: dict[str, Any], *overrides: str) -> list[dict[str, Any]]:
    file = site.write(f"{name}.yaml", {**config, "experiment": name})
    arguments = (*overrides, "--scheduler", "local", "--wait")
    site.slurmrl("submit", str(file), *arguments, timeout_s=600)
    return site.metrics(f"{name}/1")


def test_a_reward_model_is_trained_evaluated_and_judges(tmp_path: Path) -> None:
    """Its export scores the completions of PPO, and with ``total_steps=0`` it is evaluated alone:
    to the bit as at the end of its training."""
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
def test_a_teacher_of_another_layout_and_pairs_with_labels(tmp_path: Path) -> None:
    """Distillation with the teacher on one of two ranks; KTO with a reference on one."""
    site = Site(tmp_path)
    one = {"architecture": ARCHITECTURE, "backend": "fsdp:d1"}
    config = ppo_config(
        total_steps=2,
        algorithm={"name": "distill", "batch_size": 16},
        teacher={**one, "architecture": {**ARCHITECTURE, "hidden_size": 16}},
    )
    lines = run(site, "distill", config)
    assert lines[1]["reverse_kl"] == pytest.approx(lines[1]["loss"], abs=1e-4)
    assert lines[1]["importance_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert lines[-1]["grad_norm"] > 0
    assert "eval/reverse_kl" in lines[0]
    config = sft_config(
        total_steps=2,
        algorithm={"name": "kto", "batch_size": 32},
        ref={"backend": "fsdp:d1"},
        dataset=data("kto", "labels"),
        evaluation={"dataset": data("kto", "labels"), "samples": 16},
    )
    lines = run(site, "kto", config)
    assert lines[1]["loss"] == 0.5, "the actor is the reference"
    assert lines[-1]["eval/loss"] != 0.5


@pytest.mark.long
@pytest.mark.parametrize("name", [*SHORT, "custom/simpo", "custom/selective"])
def test_an_example_runs_in_a_short_form(name: str, tmp_path: Path) -> None:
    """From random weights instead of the models of other trials."""
    site, model = Site(tmp_path), json.dumps(ARCHITECTURE)
    small = [f"actor.architecture={model}", f"actor.tokenizer={TOKENIZER}", "actor.path=null"]
    small += ["total_steps=2", "algorithm.batch_size=16", "evaluation.samples=16"]
    if name == "distill":
        small.append(f"teacher={{architecture: {model}}}")
    if name == "custom/simpo":
        small.append("evaluation.n=2")
    if name == "custom/selective":
        other = json.dumps({**ARCHITECTURE, "hidden_size": 16})
        small.append(f"models.guide={{architecture: {other}}}")
    example = str(REPOSITORY / "examples" / f"{name}.yaml")
    site.slurmrl("submit", example, *small, "--scheduler", "local", "--wait", timeout_s=600)
    (experiment,) = (path.name for path in site.root.glob("*/*") if path.is_dir())
    lines = site.metrics(f"{experiment}/1")
    assert [line["step"] for line in lines] == [0, 1, 2]
    if name == "custom/simpo":
        rates = [lines[-1][f"eval/pass@2{end}"] for end in ("/low", "", "/high")]
        assert rates == sorted(rates)
    if name == "custom/selective":
        assert all(0 < line["selected"] < 1 for line in lines[1:])
    assert all("eval/reward" in line or "eval/loss" in line for line in (lines[0], lines[-1]))
