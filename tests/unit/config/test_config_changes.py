"""Settings that may change on resume, and messages about their effects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slurmrl.config.changes import (
    consequences,
    differences,
    follow_actor,
    may_change,
    moved_schedules,
)
from slurmrl.config.load import load, parse
from slurmrl.config.schema import Config
from slurmrl.plan.settings import load_settings
from tests.fake_runs import write_config
from tests.support.trials import Site, ppo_config


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


LINEAR = "actor.optimizer={lr: 0.001, schedule: linear, warmup_steps: 4}"


def told(before: Config, now: Config, step: int = 5, untrained_steps: int = 0) -> list[str]:
    trained = {"actor": untrained_steps}
    return moved_schedules(before, now, trained=trained, step=step, optimizer_steps=2)


def test_a_longer_run_reports_its_new_learning_rates(tmp_path: Path) -> None:
    before = config(tmp_path, LINEAR, "total_steps=10")
    now = config(tmp_path, LINEAR, "total_steps=20")
    assert differences(before, now) == []
    [line] = told(before, now)
    assert line == (
        "actor: the linear schedule of its learning rate ends after 40 optimizer steps, not 20: "
        "after step 5 the rate continues from 0.000829, not 0.0006; "
        "to keep 20, set actor.optimizer.schedule_steps=20"
    )
    assert "from 0.000543, not 0;" in told(before, now, step=10)[0]


def test_schedule_begins_with_the_first_step_that_trains_its_model(tmp_path: Path) -> None:
    """Three additional steps at the start change nothing."""
    before, now = (config(tmp_path, LINEAR, f"total_steps={steps}") for steps in (10, 20))
    later = [config(tmp_path, LINEAR, f"total_steps={steps}") for steps in (13, 23)]
    [line], [moved] = told(before, now), told(*later, step=8, untrained_steps=3)
    assert moved == line.replace("after step 5", "after step 8")


def test_schedule_steps_keeps_the_learning_rates_of_a_longer_run(tmp_path: Path) -> None:
    before = config(tmp_path, LINEAR, "total_steps=10")
    now = config(tmp_path, LINEAR, "total_steps=20", "actor.optimizer.schedule_steps=20")
    assert differences(before, now) == []
    assert told(before, now) == []
    for step in range(10, 20):
        rates = [one.actor.optimizer.learning_rate(step, 20) for one in (before, now)]
        assert rates[0] == rates[1]


@pytest.mark.parametrize("total", [10, 20])
def test_unchanged_learning_rates_get_no_note(tmp_path: Path, total: int) -> None:
    constant = "actor.optimizer={lr: 0.001}"
    before, now = (config(tmp_path, constant, f"total_steps={n}") for n in (10, total))
    assert told(before, now) == []
    assert told(config(tmp_path, LINEAR), config(tmp_path, LINEAR)) == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Site(tmp_path).write("ppo.yaml", ppo_config())


def resolved(path: Path, *overrides: str) -> Config:
    return load_settings(path, overrides).config


def backends(config: Config) -> dict[str, str]:
    assert config.critic is not None
    assert config.ref is not None
    roles = {"actor": config.actor, "critic": config.critic, "ref": config.ref}
    return {role: model.backend for role, model in roles.items()}


def moved(path: Path, *overrides: str) -> Config:
    """Return the configuration that ``resume`` makes from the resolved one."""
    return then(path, resolved(path), overrides)


def then(path: Path, before: Config, overrides: Sequence[str]) -> Config:
    from slurmrl.config.load import dump

    kept = path.with_name("config.yaml")
    kept.write_text(dump(before))
    return resolved(kept, *follow_actor(before, overrides))


@pytest.mark.parametrize(
    "override", ["actor.backend=fsdp:d4", " actor.backend =fsdp:d4", "actor.backend='fsdp:d4'"]
)
def test_roles_placed_with_the_actor_follow_its_layout(path: Path, override: str) -> None:
    assert set(backends(moved(path, override)).values()) == {"fsdp:d4"}


def test_last_override_wins_for_roles_that_follow_the_actor(path: Path) -> None:
    overrides = ("critic.backend=fsdp:d4", "actor.backend=fsdp:d4")
    assert set(backends(moved(path, *overrides)).values()) == {"fsdp:d4"}
    assert follow_actor(resolved(path), overrides)[-2:] == list(overrides)


def test_changed_number_of_rollout_tasks_keeps_the_layout(path: Path) -> None:
    before = resolved(path, "rollout.tasks={max: 2}")
    after = then(path, before, ["rollout.tasks.max=3"])
    assert (before.rollout.backend, after.rollout.backend) == ("native:d2", "native:d3")
    assert differences(before, after) == consequences(before, after) == []


def test_overrides_without_layout_change_stay_as_given(path: Path) -> None:
    overrides = ["total_steps=9", "actor.optimizer.lr=1.0"]
    assert follow_actor(resolved(path), overrides) == overrides


def test_resume_accepts_a_new_layout_and_reports_its_cost(path: Path) -> None:
    before, after = resolved(path), moved(path, "actor.backend=fsdp:d4")
    assert differences(before, after) == []
    told = consequences(before, after)
    assert told[0].startswith("changed layout: actor.backend: 'fsdp:d2' -> 'fsdp:d4'; critic.")
    assert "preserved exactly" in told[1]
    assert "random state is reseeded" in told[2]
    assert "minibatch" not in told[2]  # batches have the same samples on any number of ranks


@pytest.mark.parametrize(
    "override", ["rollout.backend=native:d2", "actor.backend=fsdp:t2", "ref.backend=fsdp:d4"]
)
def test_random_states_are_kept_on_the_same_number_of_ranks(path: Path, override: str) -> None:
    *_, lost = consequences(resolved(path), moved(path, override))
    assert lost == "results are not bit-identical: sums are computed in another order"


def test_changed_micro_batches_change_only_the_order_of_sums(path: Path) -> None:
    before = resolved(path)
    after = resolved(path, "actor.max_tokens_per_microbatch=64")
    assert differences(before, after) == []
    *_, lost = consequences(before, after)
    assert lost == "results are not bit-identical: sums are computed in another order"


def test_unchanged_layout_has_no_consequences(path: Path) -> None:
    assert consequences(resolved(path), resolved(path, "total_steps=9", "checkpoint={}")) == []


def test_message_lists_settings_that_may_change() -> None:
    own, of_models = (part.split(", ") for part in may_change().split("; of each model: "))
    assert {"total_steps", "cluster", "rollout.backend"} <= set(own)
    assert {"backend", "gpus"} <= set(of_models)
    assert not [key for key in own if key.startswith(("actor.", "models."))]
