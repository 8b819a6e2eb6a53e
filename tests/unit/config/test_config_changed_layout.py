from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from slurmrl.config.changes import consequences, differences, follow_actor, may_change
from slurmrl.config.schema import Config
from slurmrl.plan.settings import load_settings
from tests.support.trials import Site, ppo_config


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


def test_last_override_of_a_following_role_wins(path: Path) -> None:
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
