"""The examples are valid configurations; only data and start models may be missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmrl.data.tokenizer import train_bpe
from slurmrl.errors import ConfigError
from slurmrl.plan.settings import load_settings

EXAMPLES = Path(__file__).parents[3] / "examples"


def lacking(name: str, root: Path) -> set[str]:
    """Keys of the example's problems."""
    with pytest.raises(ConfigError) as caught:
        load_settings(EXAMPLES / name, root=root)
    return {problem.key for problem in caught.value.problems}


def test_the_start_model_learns_until_an_evaluation_says_so(tmp_path: Path) -> None:
    config = load_settings(EXAMPLES / "sft.yaml", root=tmp_path).config
    assert config.stop_when == "eval/reward >= 0.4"
    assert config.evaluation is not None
    assert config.evaluation.every_steps == 10
    assert config.actor.backend == "fsdp:d2"


@pytest.mark.parametrize("name", ["ppo", "ppo_ema", "grpo"])
def test_rl_lacks_nothing_but_its_start_model(tmp_path: Path, name: str) -> None:
    assert lacking(f"{name}.yaml", tmp_path) == {"actor.path"}


def test_gsm8k_lacks_nothing_but_data_and_start_model(tmp_path: Path) -> None:
    data = {"dataset.path", "evaluation.dataset.path"}
    assert lacking("gsm8k_sft.yaml", tmp_path) <= {*data, "actor.tokenizer"}
    assert lacking("gsm8k_ppo.yaml", tmp_path) <= {*data, "actor.path"}


def test_gsm8k_takes_its_paths_as_overrides(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "1+1?", "answer": "2\n#### 2"}) + "\n")
    train_bpe(["some text"], 300, tmp_path / "tokenizer")
    overrides = [
        f"dataset.path={rows}",
        f"evaluation.dataset.path={rows}",
        f"actor.tokenizer={tmp_path / 'tokenizer'}",
    ]
    settings = load_settings(EXAMPLES / "gsm8k_sft.yaml", overrides, root=tmp_path)
    assert settings.config.dataset.path == str(rows)


def test_a_reward_of_ones_own_lacks_nothing_but_its_start_model(tmp_path: Path) -> None:
    assert lacking("custom/reward.yaml", tmp_path) == {"actor.path"}
