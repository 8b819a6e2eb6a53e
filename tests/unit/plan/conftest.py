"""A folder with a valid PPO configuration, in which tests make one change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest

from slurmrl.errors import Problem
from slurmrl.plan.settings import Settings, load_settings

ARCHITECTURE = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
PPO = """\
experiment: addition
total_steps: 60
algorithm:
  name: ppo
  batch_size: 64
actor:
  path: model
  backend: fsdp:d2
dataset:
  type: prompt
  path: train.jsonl
reward:
  name: exact_match
evaluation:
  dataset:
    type: prompt
    path: held_out.jsonl
  every_steps: 10
"""
Load: TypeAlias = Callable[..., Settings]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with ppo.yaml and the files that it names."""
    (tmp_path / "ppo.yaml").write_text(PPO)
    write_model(tmp_path / "model")
    for name in ("train.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text('{"id": "1", "prompt": "1+1=", "answer": "2"}\n')
    return tmp_path


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(ARCHITECTURE))


@pytest.fixture
def load_ppo(folder: Path) -> Load:
    def load(*overrides: str, text: str = PPO, planning: bool = False) -> Settings:
        (folder / "ppo.yaml").write_text(text)
        path, root = folder / "ppo.yaml", folder / "runs"
        return load_settings(path, overrides, root=root, planning=planning)

    return load


LARGE = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
EXPERTS = {
    **LARGE,
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
BOUNDED = ("dataset.max_prompt_tokens=256", "rollout.max_new_tokens=256")


@pytest.fixture
def plan_ppo(folder: Path) -> Load:
    """Return settings of a plan with a model that can be split, or with another
    ``architecture``.
    """

    def load(*overrides: str, architecture: Mapping[str, object] = LARGE) -> Settings:
        actor = ("actor.path=", f"actor.architecture={json.dumps(architecture)}")
        given = ("actor.tokenizer=model", *BOUNDED, *actor, *overrides)
        return load_settings(folder / "ppo.yaml", given, root=folder / "runs", planning=True)

    return load


class Refusal(NamedTuple):
    """A row of a file of wrong settings."""

    section: str
    key: str
    message: str
    overrides: list[str]


def refusals(name: str) -> Iterator[Refusal]:
    """Read a file of this folder: sections of rows ``key | message | overrides``."""
    section = ""
    for line in (Path(__file__).parent / name).read_text().splitlines():
        if line.startswith("["):
            section = line.removeprefix("[").removesuffix("]")
        elif line and not line.startswith("#"):
            key, message, overrides = (part.strip() for part in line.split("|", 2))
            yield Refusal(section, key, message, overrides.split(" ; "))


def refused_settings(name: str) -> list[object]:
    """Return key, message and overrides of rows whose section has further overrides."""
    return [
        pytest.param(
            row.key,
            row.message,
            [*filter(None, row.section.split(" ; ")), *row.overrides],
            id=" ".join(row.overrides),
        )
        for row in refusals(name)
    ]


def memory_problems(settings: Settings) -> list[Problem]:
    """Return the models that are too large for a GPU, which prevents a submission."""
    return [problem for problem in settings.missing if "GiB" in problem.message]
