"""A run's export is a Hugging Face model with the outputs of the run's model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from slurmrl.models.model_tensors import open_folder
from slurmrl.rollouts.generation.base import GenerationOptions
from tests.support.decoder_folders import from_hf
from tests.support.generated import generate
from tests.support.trials import ARCHITECTURE, Site, ppo_config, sft_config

MARGIN = 1e-4
"""Margin between the two best tokens' logits, below which either answer is correct."""
PROMPTS = [f"{a}+{b}=" for a in range(10, 100, 7) for b in range(10, 100, 11)]
NEW_TOKENS = 4
GENERATION = {"eos_token_id": [1, 6], "top_k": 5}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A finished trial that started from a model in bfloat16."""
    site = Site(tmp_path_factory.mktemp("export"))
    source = site.folder / "source"
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**ARCHITECTURE))
    model.to(torch.bfloat16).save_pretrained(source)
    (source / "generation_config.json").write_text(json.dumps(GENERATION))
    actor = {**sft_config()["actor"], "architecture": None, "path": str(source)}
    checkpoint = {**sft_config()["checkpoint"], "export_dtype": "source"}
    config = site.write("sft.yaml", sft_config(actor=actor, checkpoint=checkpoint))
    site.slurmrl("submit", str(config), "--scheduler", "local", "--wait")
    return site


@pytest.fixture(scope="module")
def export(site: Site) -> Path:
    return Path(site.status("sft/1")["export"])


def theirs(model: Any, ids: torch.Tensor) -> tuple[list[int], bool]:
    """Return transformers' greedy continuation, and whether each token was clearly more likely than
    all others.
    """
    clear = True
    new: list[int] = []
    for _ in range(NEW_TOKENS):
        logits = model(ids[None]).logits[0, -1]
        best = logits.topk(2).values
        clear = clear and bool(best[0] - best[1] > MARGIN)
        new.append(int(logits.argmax()))
        if new[-1] == model.config.eos_token_id:
            break
        ids = torch.cat([ids, ids.new_tensor([new[-1]])])
    return new, clear


@torch.no_grad()
def test_exported_model_gives_the_same_greedy_answers(export: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    model.config.eos_token_id = tokenizer.eos_token_id
    prompts = [torch.tensor(tokenizer(text).input_ids) for text in PROMPTS]
    sizes = [0, *torch.tensor([len(prompt) for prompt in prompts]).cumsum(0).tolist()]
    output = generate(
        from_hf(export),
        torch.cat(prompts),
        torch.tensor(sizes, dtype=torch.int32),
        GenerationOptions(
            max_new_tokens=NEW_TOKENS, greedy=True, stop_token_ids=(tokenizer.eos_token_id,)
        ),
        seed=0,
        step=0,
        keys=torch.arange(len(prompts)),
    )
    answers = output.tokens.split(output.lengths.tolist())
    compared = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        expected, clear = theirs(model, prompt)
        if clear:
            compared += 1
            assert answer[len(prompt) :].tolist() == expected
    assert compared > len(PROMPTS) // 2


def test_dtypes_and_stop_tokens_pass_from_trial_to_trial(site: Site, export: Path) -> None:
    """A model in bfloat16 that stops at two tokens is trained by SFT, then by PPO."""
    actor = {"path": "trial:sft/1", "backend": "fsdp:d2"}
    checkpoint = {**ppo_config()["checkpoint"], "export_dtype": "source"}
    config = ppo_config(actor=actor, checkpoint=checkpoint, total_steps=1, evaluation=None)
    site.slurmrl("submit", str(site.write("ppo.yaml", config)), "--scheduler", "local", "--wait")
    source = site.folder / "source"
    for folder in (export, Path(site.status("ppo/1")["export"])):
        assert json.loads((folder / "generation_config.json").read_text()) == GENERATION
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
        assert {spec.dtype for spec in open_folder(folder).specs().values()} == {"bfloat16"}
        sizes = [(one / "model.safetensors").stat().st_size for one in (source, folder)]
        assert abs(sizes[0] - sizes[1]) < 100  # of the header
    logs = site.paths("ppo/1").logs.rglob("*")
    said = "".join(path.read_text() for path in logs if path.is_file())
    assert "a completion ends with one of these tokens: '<eos>' (1), '3' (6)" in said


def test_exported_files_are_private(export: Path) -> None:
    for file in export.iterdir():
        assert os.stat(file).st_mode & 0o077 == 0, file


def test_export_command_writes_the_same_files_and_earlier_steps(
    site: Site, export: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "last"
    assert site.slurmrl("export", "sft/1", "--out", str(folder)).stdout == f"{folder}\n"
    assert sorted(os.listdir(folder)) == sorted(os.listdir(export))
    for file in export.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes(), file.name
    site.slurmrl("export", "sft/1", "--step", "6", "--out", str(tmp_path / "earlier"))
    earlier, last = (from_hf(one).state_dict() for one in (tmp_path / "earlier", folder))
    assert any(not torch.equal(earlier[name], last[name]) for name in last)
