"""A trial that reads a checkpoint of another trial."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.rotation import ADAPTERS, in_turn
from tests.support.trials import ADDITION, ARCHITECTURE, Site

ROWS = 6


def start(folder: Path) -> Site:
    """Train adapters for two steps on two ranks without an export."""
    site = Site(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**ARCHITECTURE))
    model.save_pretrained(folder / "base")
    config = {
        "experiment": "sft",
        "total_steps": 2,
        "algorithm": {"name": "sft", "batch_size": 8},
        "actor": {
            "path": str(folder / "base"),
            "tokenizer": str(ADDITION / "tokenizer"),
            "backend": "fsdp:d2",
            "lora": {"rank": 3},
            "optimizer": {"lr": 0.05},
        },
        "dataset": {"type": "prompt_answer", "path": str(ADDITION / "train.jsonl")},
        "checkpoint": {"every_steps": 1, "export_at_end": False},
    }
    site.slurmrl("submit", str(site.write("sft.yaml", config)), "--scheduler", "local", "--wait")
    return site


def sampled(site: Site, trial: str, path: str, *more: str) -> list[dict[str, Any]]:
    """Return the results of ``generate`` for a model."""
    config = {
        "experiment": "sampled",
        "algorithm": {"name": "generate", "batch_size": 4, "logprobs": True},
        "rollout": {"n": 2, "max_new_tokens": 4},
        "actor": {"path": path},
        "dataset": {"type": "prompt", "path": str(site.folder / "rows.jsonl")},
    }
    file = str(site.write("sampled.yaml", config))
    site.slurmrl("submit", file, f"trial={trial}", *more, "--scheduler", "local", "--wait")
    lines = site.paths(f"sampled/{trial}").results.read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.long
@in_turn(1, ADAPTERS)
def test_checkpoint_samples_the_tokens_of_its_export(tmp_path: Path) -> None:
    """Another number of ranks and transformers read the checkpoint, even after its trial has
    continued and deleted it.
    """
    site = start(tmp_path)
    held_out = (ADDITION / "heldout.jsonl").read_text().splitlines()[:ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join(held_out) + "\n")
    folder = tmp_path / "exported"
    site.slurmrl("export", "sft/1", "--step", "1", "--out", str(folder), "--dtype", "float32")
    expected = sampled(site, "exported", str(folder))
    found = {"hf": sampled(site, "hf", "trial:sft/1@1", "actor.implementation=hf")}
    site.slurmrl("resume", "sft/1", "total_steps=4", "checkpoint.keep_last=1", "--wait")
    checkpoints = sorted(path.name for path in site.paths("sft/1").checkpoints.iterdir())
    assert [name.partition(".")[0] for name in checkpoints] == ["step-00000004"]
    found["two"] = sampled(site, "two", "trial:sft/1@1", "actor.backend=fsdp:d2")
    for name, rows in found.items():
        assert len(rows) == ROWS
        for row, other in zip(rows, expected, strict=True):
            for one, two in zip(row["completions"], other["completions"], strict=True):
                assert one["token_ids"] == two["token_ids"], (name, row["id"])
                assert one["logprobs"] == pytest.approx(two["logprobs"], abs=1e-4), name
