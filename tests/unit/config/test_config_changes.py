from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.changes import differences
from slurmrl.config.load import load, parse
from slurmrl.config.schema import Config
from tests.fake_runs import write_config


def config(folder: Path, *overrides: str) -> Config:
    return parse(load(write_config(folder), overrides))


EVALUATION = "evaluation={dataset: {type: prompt, path: data.jsonl}"


@pytest.mark.parametrize(
    "override",
    [
        "total_steps=9",
        "stop_when=reward >= 0.5",
        "root=/elsewhere",
        "cluster.slurm.time=30",
        "cluster.threads_per_worker=2",
        "logging.tensorboard=true",
        "checkpoint.every_steps=3",
        "max_restarts_without_commit=9",
        "step_timeout_s=5",
        "rollout.publish={every_steps: 2}",
        "rollout.slurm.partition=preemptible",
    ],
)
def test_allowed_change_is_not_reported_as_a_difference(tmp_path: Path, override: str) -> None:
    assert differences(config(tmp_path), config(tmp_path, override)) == []


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("seed=2", "seed: 1 in the trial, 2 now"),
        ("actor.optimizer.lr=3e-5", "actor.optimizer.lr: 1e-05 in the trial, 3e-05 now"),
        ("algorithm.batch_size=16", "algorithm.batch_size: 8 in the trial, 16 now"),
        ("deterministic=false", "deterministic: nothing in the trial, False now"),
        ("reward.name=math", "reward: nothing in the trial, a section now"),
        (f"{EVALUATION}}}", "evaluation: nothing in the trial, a section now"),
    ],
)
def test_forbidden_change_is_reported_as_a_difference(
    tmp_path: Path, override: str, line: str
) -> None:
    assert differences(config(tmp_path), config(tmp_path, override)) == [line]


def test_all_differences_are_reported(tmp_path: Path) -> None:
    changed = config(tmp_path, "seed=2", "total_steps=9", "actor.architecture.vocab_size=65")
    assert [line.partition(":")[0] for line in differences(config(tmp_path), changed)] == [
        "seed",
        "actor.architecture.vocab_size",
    ]


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (", every_steps: 3}", []),
        (", at_start: false}", []),
        (", keep_last: 2}", []),
        (", samples: 3}", ["samples"]),
    ],
)
def test_evaluation_frequency_may_change(tmp_path: Path, change: str, differs: list[Any]) -> None:
    lines = differences(
        config(tmp_path, f"{EVALUATION}}}"), config(tmp_path, f"{EVALUATION}{change}")
    )
    assert [line.partition(":")[0] for line in lines] == [f"evaluation.{key}" for key in differs]


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ("max: 3", []),
        ("max_in_flight: 8", []),
        ("orphan_s: 60.0", []),
        ("max_staleness: 2", ["max_staleness"]),
        ("interruptible: false", ["interruptible"]),
        ("stale_cache: true", ["stale_cache"]),
    ],
)
def test_number_but_not_staleness_of_rollout_tasks_may_change(
    tmp_path: Path, change: str, differs: list[Any]
) -> None:
    before = config(tmp_path, "rollout.tasks={}")
    lines = differences(before, config(tmp_path, f"rollout.tasks={{{change}}}"))
    assert [line.partition(":")[0] for line in lines] == [f"rollout.tasks.{key}" for key in differs]


def test_every_key_that_may_change_exists() -> None:
    from slurmrl.config.changes import MAY_CHANGE, SECTIONS
    from slurmrl.config.schema import Evaluation, Model, Reward, RewardPart, Rollout, Suite
    from slurmrl.config.schema.rollout import Tasks

    fields = set(Config.model_fields)
    sections = {"evaluation": Evaluation, "rollout": Rollout, "rollout.tasks": Tasks}
    sections |= {**dict.fromkeys(SECTIONS, Model), "evaluation.suites.*": Suite}
    for section, schema in sections.items():
        fields |= {f"{section}.{name}" for name in schema.model_fields}
    rewards = ("reward", "evaluation.suites.*.reward")
    pools = {f"{key}.{pool}" for key in rewards for pool in ("pool", "parts.*.pool")}
    assert "pool" in Reward.model_fields
    assert "pool" in RewardPart.model_fields
    assert fields | pools >= MAY_CHANGE
