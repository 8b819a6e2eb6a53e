"""Invalid configurations: each gives one message, at the invalid key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from slurmrl.errors import ConfigError, Problem
from tests.unit.plan.conftest import ARCHITECTURE, EXPERTS, LARGE, Load, refusals

ARCHITECTURES = {
    "llama": LARGE,
    "small": ARCHITECTURE,
    "qwen3_moe": EXPERTS,
    "mixtral": {**LARGE, "model_type": "mixtral", "num_local_experts": 4},
    "gpt_oss": {**LARGE, "model_type": "gpt_oss", "num_local_experts": 4},
    "gpt2": {"model_type": "gpt2", "vocab_size": 16, "n_embd": 8, "n_layer": 1, "n_head": 2},
}
BACKEND, MEGATRON = "actor.backend", "actor.backend=megatron:"


class Row(NamedTuple):
    key: str
    """Key of the only problem, ``accepted`` or ``planned``."""
    message: str
    overrides: list[str]
    plans: bool
    """Whether the configuration is planned, and not submitted."""
    architecture: dict[str, object]


def table() -> Iterator[Row]:
    """Read ``refused.txt``."""
    for section, key, message, overrides in refusals("refused.txt"):
        kind, _, name = section.partition(" ")
        yield Row(key, message, overrides, kind == "plan", ARCHITECTURES[name])


def problems(load: Load, *overrides: str, **options: Any) -> list[Problem]:
    """Return the problems that prevent a plan, else those that prevent only a submission."""
    try:
        return list(load(*overrides, **options).missing)
    except ConfigError as error:
        return list(error.problems)


@pytest.mark.parametrize("row", list(table()), ids=lambda row: " ".join(row.overrides))
def test_wrong_configuration_gives_one_message_at_its_key(
    plan_ppo: Load, load_ppo: Load, folder: Path, monkeypatch: pytest.MonkeyPatch, row: Row
) -> None:
    monkeypatch.chdir(folder)
    if row.plans and row.key == "planned":
        assert plan_ppo(*row.overrides, architecture=row.architecture).config
        return
    if row.plans:
        found = problems(plan_ppo, *row.overrides, architecture=row.architecture)
    else:
        (folder / "model" / "config.json").write_text(json.dumps(row.architecture))
        found = problems(load_ppo, *row.overrides)
    if row.key == "accepted":
        assert found == []
        return
    assert len(found) == 1, found
    [problem] = found
    assert problem.key == row.key
    assert row.message in problem.message
    assert problem.where == "command line" or re.search(r"ppo\.yaml:\d+$", problem.where)


def test_all_errors_are_reported_at_once(plan_ppo: Load) -> None:
    found = problems(
        plan_ppo,
        f"{MEGATRON}d3t3p5",
        "rollout.backend=sglang:t16",
        "actor.model.sequence_parallel=true",
        "cluster.hosts=1",
        "evaluation.samples=1",
    )
    assert {problem.key for problem in found} == {
        "actor.backend",
        "algorithm.batch_size",
        "cluster.hosts",
        "evaluation.samples",
        "rollout.backend",
    }
    told = " ".join(problem.message for problem in found)
    assert "num_attention_heads" in told
    assert "num_hidden_layers" in told


@pytest.mark.parametrize("implementation", ["hf", "builtin"])
@pytest.mark.parametrize(("new", "fits"), [(256, True), (257, False)])
def test_sequences_beyond_learned_positions_are_rejected(
    plan_ppo: Load, implementation: str, new: int, fits: bool
) -> None:
    small = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512}
    settings = plan_ppo(
        f"actor.implementation={implementation}",
        f"rollout.max_new_tokens={new}",
        "evaluation=",
        architecture={"model_type": "gpt2", "vocab_size": 151936, **small},
    )
    found = [problem for problem in settings.missing if "positions" in problem.message]
    assert [problem.key for problem in found] == ([] if fits else ["dataset.max_prompt_tokens"])
    for problem in found:
        assert "up to 513 tokens are not allowed" in problem.message
        assert "has positions for 512 tokens" in problem.message


LONGROPE = {
    **LARGE,
    "model_type": "phi3",
    "original_max_position_embeddings": 512,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
}


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["rollout.max_new_tokens=256"], None, ""),
        (
            ["rollout.max_new_tokens=257", "evaluation="],
            "dataset.max_prompt_tokens",
            "up to 513 tokens are not",
        ),
        (["dataset.max_prompt_tokens="], "dataset.max_prompt_tokens", "is required: with rope_t"),
        (
            ["evaluation.max_new_tokens=300"],
            "evaluation.dataset.max_prompt_tokens",
            "sequence (prompt and completion) has more than 512 tokens",
        ),
        (["actor.architecture.rope_scaling=", "dataset.max_prompt_tokens="], None, ""),
    ],
)
def test_transformers_lengths_are_limited_if_outputs_depend_on_batches(
    plan_ppo: Load, overrides: list[str], key: str | None, message: str
) -> None:
    settings = plan_ppo(
        "actor.implementation=hf",
        *([] if "evaluation=" in overrides else ["evaluation.dataset.max_prompt_tokens=256"]),
        *overrides,
        architecture=LONGROPE,
    )
    found = [problem for problem in settings.missing if "rope_type" in problem.message]
    assert [problem.key for problem in found] == ([key] if key else [])
    assert all(message in problem.message for problem in found)


def test_message_names_evaluation_if_only_it_generates_on_trainers(
    plan_ppo: Load,
) -> None:
    tasks = (f"{MEGATRON}d1", "rollout.backend=vllm:d1", "rollout.tasks={}")
    [problem] = [one for one in plan_ppo(*tasks).missing if one.key == BACKEND]
    assert "the trainers generate for `evaluation`" in problem.message
    remedy = "evaluation.tasks={backend: fsdp:d1}"
    assert f"with {remedy} in place of evaluation.every_steps" in problem.message
    changed = plan_ppo(*tasks, remedy, "evaluation.every_steps=null")
    assert BACKEND not in {one.key for one in changed.missing}
