"""Trials whose actor generates in a separate layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurmrl.run import events
from slurmrl.tensors.checkpoint.shards import RoleCheckpoint
from tests.distributed.test_local_elastic import assert_close, config_of
from tests.distributed.test_local_megatron import (
    CORRECTED,
    LATENT,
    REWARDED,
    let_megatron_compute_here,
)
from tests.support.hooks import hooked
from tests.support.rollout_trials import site_in
from tests.support.rotation import in_turn, rotating
from tests.support.served_trials import grpo
from tests.support.trials import ARCHITECTURE, Site

SERVE = "slurmrl.workers.worker.orders"
CHANGES = "tests.support.reallocation_hooks"
TRIALS = 8
"""Number of trials with moves that take turns, so every run has one."""


def megatron(layout: str, **more: str) -> dict[str, Any]:
    sizes = {"make_vocab_size_divisible_by": 1}
    return {"backend": f"megatron:{layout}", "model": sizes, **more}


EXPERTS = {
    **ARCHITECTURE,
    "model_type": "qwen3_moe",
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
}
ON_EXPERTS = {
    "actor": megatron("d2p2e2"),
    "critic": megatron("d4e2"),
    "ref": {"backend": "fsdp:d2t2"},
    "rollout": {"backend": "native:d2t2", "replay_experts": True},
}


def run(site: Site, trial: str, steps: int = 3, **sections: Any) -> list[dict[str, Any]]:
    """Run a PPO trial with changed sections of the configuration. Return its metrics."""
    config = config_of("ppo", trial=trial, total_steps=steps)
    config["algorithm"] |= REWARDED
    for name, section in sections.items():
        config[name] = config.get(name, {}) | section if isinstance(section, dict) else section
    file = site.write(f"{trial}.yaml", config)
    site.slurmrl("submit", str(file), "--scheduler", "local", "--wait")
    return site.metrics(f"ppo/{trial}")


@in_turn(0, TRIALS)
def test_calls_on_separate_ranks_overlap(tmp_path: Path) -> None:
    """The actor trains on two tensor ranks together with the critic, and generates on two other
    ranks together with the reference. The reference may wait for the critic. The metrics equal a
    run on one rank, although all models are offloaded between calls. The moments of the returns
    belong to the same step.
    """
    site = Site(tmp_path)
    normalized = {"value_norm": "moving"}
    found = run(
        site,
        "apart",
        algorithm=normalized,
        actor={"backend": "fsdp:t2", "offload": True},
        critic={"backend": "fsdp:d2", "offload": True},
        ref={"backend": "fsdp:d2", "gpus": "2-3", "offload": True},
        rollout={"backend": "native:d2", "gpus": "2-3"},
        code=hooked(tmp_path, "apart", SERVE, f"{CHANGES}:reference_waits_for_critic"),
    )
    assert_close(found, run(site, "one", algorithm=normalized))
    first = next(line for line in found if line["step"] == 1)
    assert first["value_norm_mean"] == pytest.approx(first["returns_mean"])


THREE_TURNS = """
from slurmrl.rollouts.completions import Completions

async def three(policy, item, tools):
    completions = Completions(item.prompt)
    for number in range(3):
        if number:
            policy.say(completions, "1")
        await policy(completions)
    return completions
"""


@in_turn(1, TRIALS)
def test_episodes_on_tensor_ranks_survive_kills(tmp_path: Path) -> None:
    """A follower rank is killed during an episode, and later its leader. The trial has the same
    bits as an undisturbed one, and log-probabilities agree with the training engine.
    """
    site, outcomes = site_in(tmp_path, {}, pause_s=0.0), []
    (tmp_path / "turns_of_mine.py").write_text(THREE_TURNS)
    episode = {"name": "turns_of_mine:three"}
    for trial in ("calm", "killed"):
        rollout = {"backend": "native:t2", "episode": episode}
        config = grpo(rollout, trial=trial, total_steps=5)
        if trial == "killed":
            dying = f"{CHANGES}:ranks_die_while_they_serve"
            config["code"] = hooked(tmp_path, trial, SERVE, dying)
        file = site.write(f"{trial}.yaml", config)
        site.slurmrl("submit", str(file), "--scheduler", "local", "--wait")
        outcomes.append(site.outcome(f"grpo/{trial}"))
    calm, killed = outcomes
    seen = events.read_all(site.paths("grpo/killed"))
    failures = [event for event in seen if event["kind"] == "failure"]
    assert [failure["rank"] for failure in failures] == [1, 0]
    assert killed == calm
    for line in calm["metrics"]:
        assert line["turns"] == 3.0
        assert line["actor_grad_norm"] > 0
        assert abs(line["mismatch/kl"]) < 1e-5


@in_turn(2, TRIALS)
def test_weights_move_once_per_step_with_several_generations(tmp_path: Path) -> None:
    """A remax step generates in each round of the filter, and then greedy completions. The metrics
    equal generation by the training engine.
    """
    site = Site(tmp_path)
    found = []
    for trial, rollout in (("moved", {"backend": "native:d1", "offload": True}), ("one", {})):
        config = config_of("ppo", trial=trial, total_steps=3, evaluation=None)
        del config["critic"], config["ref"]
        filtered = {"max_truncated": 0.5, "filter_rounds": 3}
        config["algorithm"] = {"name": "remax", "batch_size": 16, **filtered, **REWARDED}
        config["rollout"] |= rollout
        if rollout:
            counted = f"{CHANGES}:moves_are_counted"
            config["code"] = hooked(tmp_path, trial, SERVE, counted)
        file = site.write(f"{trial}.yaml", config)
        site.slurmrl("submit", str(file), "--scheduler", "local", "--wait")
        found.append(site.metrics(f"ppo/{trial}"))
    moved, one = found
    assert_close(moved, one)
    assert all(line["filter/rounds"] > 1 and line["actor_grad_norm"] > 0 for line in moved)
    assert {"greedy_reward", "greedy_response_length"} <= moved[0].keys()
    assert (tmp_path / "moves.0").read_text().count("move") == len(moved)


def test_wrong_weight_move_ends_the_incarnation(tmp_path: Path) -> None:
    """The verification of the first move finds a differing element. The next start moves all
    weights again.
    """
    site = Site(tmp_path)
    found = run(
        site,
        "wrong",
        steps=1,
        rollout={"backend": "native:d1"},
        code=hooked(tmp_path, "wrong", SERVE, f"{CHANGES}:first_move_goes_wrong"),
    )
    assert found[-1]["step"] == 1
    seen = events.read_all(site.paths("ppo/wrong"))
    (failure,) = [event for event in seen if event["kind"] == "failure"]
    assert "MoveError: reallocate actor -> rollout: after the move" in failure["reason"]


@in_turn(3, TRIALS)
def test_reference_average_follows_the_actor(tmp_path: Path) -> None:
    """In every commit, the reference is the moving average of the actor, even after a restart and
    in another layout.
    """
    site, eta = Site(tmp_path), 0.25
    sections = {
        "ref": {"backend": "fsdp:d2", "ema": eta},
        "actor": {"backend": "fsdp:t2"},
        "checkpoint": {"every_steps": 1, "keep_last": 50},
    }
    run(site, "ema", steps=2, **sections)
    site.slurmrl("resume", "ppo/ema", "ref.backend=fsdp:t2", "total_steps=4", "--wait")
    folders = site.paths("ppo/ema").checkpoints.iterdir()
    commits = {int(folder.name.split("-")[1].split(".")[0]): folder for folder in sorted(folders)}
    before: dict[str, np.ndarray] = {}
    for folder in commits.values():
        actor, ref = (RoleCheckpoint(folder, role) for role in ("actor", "ref"))
        names = [name for name, _ in actor.weights()]
        for name in names:
            if name in before:
                average = eta * actor.read(name).astype(np.float64) + (1 - eta) * before[name]
                np.testing.assert_allclose(ref.read(name), average, rtol=1e-5, atol=1e-7)
            before[name] = ref.read(name)
        assert any((before[name] != actor.read(name)).any() for name in names)
    assert set(commits) >= {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("layouts", "architecture"),
    rotating(
        pytest.param(ON_EXPERTS, EXPERTS, id="experts"),
        pytest.param(ON_EXPERTS, CORRECTED, id="corrected"),
        pytest.param(ON_EXPERTS, LATENT, id="latent"),
        first=4,
        shares=TRIALS,
    ),
)
def test_megatron_actor_generates(
    tmp_path: Path, layouts: dict[str, Any], architecture: dict[str, Any]
) -> None:
    """Megatron ranks replay the experts of generation.

    The numbers equal the results of one fsdp rank.
    """
    site, found = Site(tmp_path), []
    for trial in ("mixed", "one"):
        sections = {**layouts, "actor": {**layouts["actor"], "architecture": architecture}}
        if trial == "one":
            replays = layouts["rollout"].get("replay_experts", False)
            sections = {
                "actor": {"architecture": architecture},
                "rollout": {"replay_experts": replays},
            }
        else:
            sections["code"] = let_megatron_compute_here(site, tmp_path, trial)
        found.append(run(site, trial, **sections))
    assert_close(*found)


MANUAL = ",".join(
    [
        "actor_gen:node01:0,1,2,3:d2m2p1",
        "actor_train:node01:0,1,2,3:d1m2p2",
        "critic:node01:2,3:d2m1p1",
        "ref_inf:node01:0,1:d1m2p1",
    ]
)
"""ReaL's manual allocation."""


@in_turn(7, TRIALS)
def test_calls_on_separate_meshes_equal_one_rank(tmp_path: Path) -> None:
    """The actor generates on d2t2 and trains on megatron's t2p2, both of four ranks. The critic is
    on the last two ranks, the reference on the first two. The metrics equal a run on one rank.
    """
    site = Site(tmp_path)
    code = let_megatron_compute_here(site, tmp_path, "manual")
    actor = megatron("") | {"backend": ""}
    found = run(site, "manual", steps=2, allocation_mode=MANUAL, actor=actor, code=code)
    models = json.loads(site.paths("ppo/manual").plan.read_text())["models"]
    assert {name: (model["backend"], model["ranks"]) for name, model in models.items()} == {
        "actor": ("megatron:t2p2", [0, 1, 2, 3]),
        "critic": ("fsdp:d2", [2, 3]),
        "ref": ("fsdp:t2", [0, 1]),
        "rollout": ("native:d2t2", [0, 1, 2, 3]),
    }
    assert_close(found, run(site, "one", steps=2))
