"""The examples are valid configurations; only data and start models may be missing."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from slurmrl.data.sample import SequenceSample
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


def test_code_of_ones_own_lacks_nothing_but_its_start_model(tmp_path: Path) -> None:
    assert lacking("custom/reward.yaml", tmp_path) == {"actor.path"}
    assert lacking("custom/simpo.yaml", tmp_path) == {"actor.path"}
    assert lacking("custom/selective.yaml", tmp_path) == {"models.guide.path"}


def test_a_loss_of_ones_own_is_right_and_short() -> None:
    """SimPO by hand: two pairs of one item; answers of 1 and 2 tokens."""
    path = EXAMPLES / "custom" / "simpo.py"
    assert len(path.read_text().splitlines()) < 60
    spec = importlib.util.spec_from_file_location("simpo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["simpo"] = module
    spec.loader.exec_module(module)
    options = module.SimPO(name="simpo:SimPO", batch_size=1, beta=2.0, gamma=0.5)
    lengths = {"input_ids": [[2, 3, 2, 3]], "prompt_mask": [[2, 3, 2, 3]]}
    mask = torch.tensor([1, 0, 1, 0, 0, 1, 0, 1, 0, 0]).bool()
    logp = torch.tensor([0, -0.5, 0, -1.0, -2.0, 0, -3.0, 0, -0.2, -0.6], dtype=torch.float64)
    ids = torch.zeros(10, dtype=torch.long)
    batch = SequenceSample(("a@0",), lengths, data={"input_ids": ids, "prompt_mask": mask})
    loss, stats = module.simpo_loss({"logp": logp}, batch, options)
    margins = [2.0 * (-0.5 + 1.5) - 0.5, 2.0 * (-3.0 + 0.4) - 0.5]
    expected = sum(math.log1p(math.exp(-margin)) for margin in margins) / 2
    assert float(loss) == pytest.approx(expected, rel=1e-9)
    assert float(stats["accuracy"]) == 0.5
