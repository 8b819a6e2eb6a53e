"""Search with changes that affect the result of training: allowed, marked, and checked
by the plan.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slurmrl.cli.main import main
from slurmrl.plan.estimates.call_costs import MeanTokens
from slurmrl.plan.estimates.step_seconds import predict_step
from slurmrl.plan.settings import Settings, load_settings

TEXT = """\
experiment: allowed
total_steps: 100
algorithm: {name: ALGORITHM, batch_size: 64}
actor:
  backend: fsdp:d8
  dtype: float32  # the seed's precision
  architecture: {model_type: llama, vocab_size: 32000, hidden_size: 2048, intermediate_size: 5632,
    num_hidden_layers: 16, num_attention_heads: 16, num_key_value_heads: 8,
    max_position_embeddings: 8192}
cluster: {workers_per_host: 8, slurm: {gpu_type: h100}}
"""
GRPO = """\
rollout: {n: 4, max_new_tokens: 512, backend: "native:d8", gpus: 0-7}
reward: {name: exact_match}
dataset: {type: prompt, path: train.jsonl, max_prompt_tokens: 256}
"""
SFT = "dataset: {type: prompt_answer, path: train.jsonl, max_tokens: 2048}\n"
MEAN = MeanTokens(128, 256)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "grpo.yaml"
    path.write_text(TEXT.replace("ALGORITHM", "grpo") + GRPO)
    return path


def load(path: Path, *overrides: str) -> Settings:
    return load_settings(path, overrides, scheduler="slurm", planning=True)


def searched(
    capsys: pytest.CaptureFixture[str], path: Path, *arguments: str, code: int = 0
) -> dict[str, Any]:
    assert main(["search", str(path), "--gpus=8", "--json", *arguments]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("allowed", "learned"),
    [
        ("staleness", {"rollout.tasks.max_staleness"}),
        ("precision", {"actor.dtype"}),
        ("precision,staleness", {"actor.dtype", "rollout.tasks.max_staleness"}),
    ],
)
def test_allowed_changes_are_made_and_marked(
    capsys: pytest.CaptureFixture[str], config: Path, allowed: str, learned: set[str]
) -> None:
    best = config.with_name("best.yaml")
    found = searched(capsys, config, f"--allow={allowed}", f"--write={best}")
    first = found["answers"][0]
    assert set(first["learned"]) == learned
    assert first["seconds"] < found["unchanged_seconds"]
    before, after = load(config).config, load(best)
    step = predict_step(after, MEAN)
    assert step is not None
    assert step.total == pytest.approx(first["seconds"])
    tasks = after.config.rollout.tasks
    assert (tasks is not None) == ("rollout.tasks.max_staleness" in learned)
    assert tasks is None or tasks.max_staleness == 1
    assert (after.config.actor.dtype != before.actor.dtype) == ("actor.dtype" in learned)
    lines = [" ".join(line.split()) for line in best.read_text().splitlines()]
    marked = [line for line in lines if "changes the result of training" in line]
    assert len(marked) == len(learned)
    assert all(any(f"({name})" in line for line in marked) for name in allowed.split(","))
    shown = {" and ".join(sorted(set(one["learned"].values()))) for one in found["answers"]}
    for names in ("precision", "staleness", "precision and staleness"):
        if set(names.split(" and ")) <= set(allowed.split(",")):
            assert names in shown or any(f"{names}: " in line for line in found["refused"])
    kept = "# the seed's precision" + ("; set by" if "actor.dtype" in learned else "")
    assert any(kept in line for line in lines)


def test_no_setting_is_changed_without_permission(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    found = searched(capsys, config)
    assert "unchanged_seconds" not in found
    assert found["answers"]
    for one in found["answers"]:
        assert one["learned"] == {}
        assert not any("dtype" in key or "tasks" in key for key in one["settings"])


def test_defaults_that_follow_from_a_change_are_named(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    found = searched(capsys, config, "--allow=precision")["answers"][0]
    before, after = load(config), load(config, "actor.dtype=bfloat16")
    name = "recompute_logprobs"
    old, new = (one.config.algorithm[name] for one in (before, after))
    assert old != new
    assert f"algorithm.{name}={new} instead of {old}" in found["follows"]


def test_roles_with_explicit_float32_change_dtype_together(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    config.write_text(config.read_text() + "ref: {dtype: float32}\n")
    found = searched(capsys, config, "algorithm.kl.coef=0.1", "--allow=precision")
    assert set(found["answers"][0]["learned"]) == {"actor.dtype", "ref.dtype"}


def test_rejected_changes_are_listed_with_the_plans_reason(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    config.write_text(TEXT.replace("ALGORITHM", "sft") + SFT)
    found = searched(capsys, config, "--allow=staleness,precision")
    assert set(found["answers"][0]["learned"].values()) == {"precision"}
    reasons = "\n".join(found["refused"])
    assert "staleness: rollout.tasks: is not allowed: sft does not train on completions" in reasons
    assert "precision and staleness: rollout.tasks" in reasons
    narrow = searched(capsys, config, "actor.dtype=bfloat16", "--allow=precision")
    assert narrow["refused"] == ["precision: all models compute in bfloat16 already"]
    assert narrow["answers"][0]["learned"] == {}


def test_staleness_is_raised_only_from_zero(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    """Without staleness, generation and training take turns."""
    tasks = ("rollout.backend=native:d4", "rollout.gpus=null", "actor.backend=fsdp:d4")
    given = [load(config, *tasks, f"rollout.tasks.max_staleness={size}") for size in (0, 1)]
    together, overlapping = (predict_step(one, MEAN) for one in given)
    assert together is not None
    assert overlapping is not None
    generation = sum(together.calls["actor_gen"].values()) * (1 + together.rest)
    assert together.total == pytest.approx(together.of_trainers + generation)
    assert overlapping.total == pytest.approx(max(overlapping.of_trainers, generation))
    waits = searched(capsys, config, *tasks, "rollout.tasks.max_staleness=0", "--allow=staleness")
    assert waits["answers"][0]["settings"]["rollout.tasks.max_staleness"] == 1
    stale = searched(capsys, config, *tasks, "rollout.tasks.max_staleness=2", "--allow=staleness")
    assert "max_staleness is 2 already" in stale["refused"][0]
    assert stale["answers"][0]["learned"] == {}


def test_table_names_the_changes_of_the_best_answer(
    capsys: pytest.CaptureFixture[str], config: Path
) -> None:
    assert main(["search", str(config), "--gpus=8", "--allow=staleness,precision"]) == 0
    text = capsys.readouterr().out
    for words in (
        "CHANGES",
        "precision+staleness",
        "answer 1 changes the result of training:",
        "actor.dtype (precision)",
        "rollout.tasks.max_staleness (staleness)",
        "best with an unchanged result of training: ",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("stalenes", "unknown change 'stalenes'; did you mean 'staleness'"),
        ("precision,batch", "unknown change 'batch'; allowed: precision, staleness"),
        (",", "--allow is empty; allowed changes: precision, staleness"),
        ("", "--allow is empty; allowed changes: precision, staleness"),
    ],
)
def test_unknown_change_is_rejected(
    capsys: pytest.CaptureFixture[str], config: Path, value: str, message: str
) -> None:
    assert main(["search", str(config), "--gpus=8", f"--allow={value}"]) == 2
    assert message in capsys.readouterr().err
