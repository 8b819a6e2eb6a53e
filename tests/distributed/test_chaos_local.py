"""Local trials whose processes are killed at seeded random moments have the result of an
undisturbed trial.

The test makes a few kills of each kind; `scripts/chaos` makes any number. Other tests in this
folder kill each kind of process once, at one step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chaos_trials.kills import PHASES, draw
from tests.support.chaos_trials.monkey import succession
from tests.support.chaos_trials.runs import Setting, chaos, undisturbed
from tests.support.trials import processes


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return the folder of the trials. Processes that still run in it at the end are killed."""
    yield tmp_path
    for run in tmp_path.glob("*/runs/*/*/*"):
        for chain in processes(run)["chain"]:
            os.kill(chain, signal.SIGKILL)  # its children end with it


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("algorithm", "ranks", "seed", "causes"),
    [
        ("sft", 1, 11, ("worker", "supervisor", "warn")),
        ("sft", 4, 12, ("worker", "master", "worker")),
        ("ppo", 1, 13, ("master", "agent", "chain")),
        ("ppo", 4, 14, ("worker", "master", "agent")),
    ],
)
def test_disturbed_trial_ends_like_undisturbed_one(
    folder: Path, algorithm: str, ranks: int, seed: int, causes: tuple[str, ...]
) -> None:
    setting = Setting(algorithm, ranks, len(causes))
    check(folder, setting, seed, causes)


def check(folder: Path, setting: Setting, seed: int, causes: tuple[str, ...]) -> None:
    calm = undisturbed(setting, folder / "undisturbed")
    differences, kills = chaos(setting, folder / "disturbed", seed, causes, calm)
    assert not differences, f"seed {seed}, {kills}"
    assert sorted(kill.plan.cause for kill in kills) == sorted(causes)


def test_disturbance_plan_follows_from_the_seed() -> None:
    causes = ("worker", "master", "agent")
    plans = draw(5, 30, causes, 120)
    assert plans == draw(5, 30, causes, 120) != draw(6, 30, causes, 120)
    assert [plan.step for plan in plans] == sorted(plan.step for plan in plans)
    assert {plan.phase for plan in plans} == PHASES.keys()
    assert all(1 <= plan.step <= 120 for plan in plans)
    assert {cause: sum(plan.cause == cause for plan in plans) for cause in causes} == dict.fromkeys(
        causes, 10
    )


def test_kind_of_restart_follows_from_job_tags() -> None:
    assert succession("7.0.0", "7.0.0") == "in the job"
    assert succession("7.0.0", "7.0.1") == "next round"
    assert succession("7.0.1", "7.1.0") == "requeue"
    assert succession("7.0.0", "8.0.0") == "next link"
