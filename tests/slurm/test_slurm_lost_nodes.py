"""Trials on a real Slurm that lose nodes or are preempted have the result of an undisturbed trial.
Tests use only the command line.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support import paced
from tests.support.chaos_trials.watched import Outcome, Watched
from tests.support.nodes import (
    NO_USER_SIGNAL,
    kill_daemon,
    kill_node,
    node_of,
    on_node,
    preempt,
    private_bed,
    slurm,
)
from tests.support.rotation import in_turn, rotating
from tests.support.trials import alive, processes, wait_until

OTHER_JOB = ("requeue", "next link")
"""While Slurm holds a requeued element back, the next one of the array may start first."""

pytestmark = pytest.mark.timeout(1800)
long = pytest.mark.long
soak = pytest.mark.soak
LOSSES = 6
"""Number of ways to lose a node. They take turns, so every run has one."""


@pytest.fixture
def breakable() -> Iterator[Path]:
    """Start a private test bed whose nodes a test may kill."""
    with private_bed() as directory:
        yield directory


def low(folder: Path) -> dict[str, Any]:
    return paced.cluster(folder, partition="low")


@long
@pytest.mark.parametrize("options", rotating((), NO_USER_SIGNAL), ids=["user signal", "TERM only"])
def test_preempted_trial_commits_within_the_grace_time(
    tmp_path: Path, calm: Outcome, options: tuple[str, ...]
) -> None:
    """If the configuration sets a signal, the batch process gets it as a warning. Otherwise only
    the tasks get TERM and CONT.
    """
    with private_bed(*options):
        trial = paced.start(
            tmp_path, cluster=low(tmp_path), checkpoint={"every_steps": 1000, "keep_last": 9}
        )
        assert paced.after(trial, preempt) in OTHER_JOB
        paced.hurry(trial)
        outcome = trial.outcome()
        steps = [commit.step for commit in trial.witness.state.commits if commit.incarnation == 1]
        assert steps == [max(trial.witness.posted[1])], "it stopped at a step and committed it"
    assert calm.final["metrics"] == outcome.final["metrics"]
    assert calm.batches == outcome.batches


@soak
def test_preempted_trial_without_grace_time_continues(tmp_path: Path, calm: Outcome) -> None:
    """The run has no time for a commit, so the next link resumes from the last commit."""
    with private_bed():
        slurm("scontrol", "update", "PartitionName=low", "GraceTime=0")
        trial = paced.start(tmp_path, cluster=low(tmp_path))
        assert paced.after(trial, preempt) in OTHER_JOB
        paced.same(trial, calm)


def node(trial: Watched, role: str, index: int = -1) -> str:
    return node_of(processes(trial.witness.paths.run)[role][index])


@long
@in_turn(0, LOSSES)
def test_trial_continues_after_a_node_is_set_down(
    tmp_path: Path, breakable: Path, calm: Outcome
) -> None:
    trial = paced.start(tmp_path)

    def down() -> None:
        name = node(trial, "supervisor")
        slurm("scontrol", "update", f"nodename={name}", "state=down", "reason=test")

    assert paced.after(trial, down) in OTHER_JOB
    paced.same(trial, calm)


@long
@pytest.mark.parametrize("first", rotating(True, False, first=1, shares=LOSSES))
def test_trial_continues_after_a_node_is_lost(
    tmp_path: Path, breakable: Path, calm: Outcome, first: bool
) -> None:
    """slurmd and all processes of one node end at the same moment. The node is the batch host or
    the other host.
    """
    trial = paced.start(tmp_path)

    def lose() -> None:
        batch = node(trial, "supervisor")
        names = {node_of(pid) for pid in processes(trial.witness.paths.run)["agent"]}
        name = batch if first else (names - {batch}).pop()
        kill_node(breakable, trial.witness.paths.run, name)

    assert paced.after(trial, lose) in OTHER_JOB
    paced.same(trial, calm)


@long
@pytest.mark.parametrize("stop", rotating(True, False, first=3, shares=LOSSES))
def test_nodes_marked_dead_by_slurm_commit_nothing(
    tmp_path: Path, breakable: Path, calm: Outcome, stop: bool
) -> None:
    """The slurmd of each node is killed. The processes of the incarnation continue to train, or are
    stopped until another incarnation trains elsewhere. Afterwards they exit and commit nothing.
    """
    trial = paced.start(tmp_path)
    run = trial.witness.paths.run
    old: list[int] = []

    def lose_daemons() -> None:
        for name in {node_of(pid) for pid in processes(run)["agent"]}:
            kill_daemon(breakable, name)
            for pid in on_node(run, name):
                os.kill(pid, signal.SIGSTOP if stop else 0)
                old.append(pid)

    assert paced.after(trial, lose_daemons) in OTHER_JOB
    for pid in old:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    wait_until("the old incarnation to leave", lambda: not any(map(alive, old)))
    paced.same(trial, calm)


@long
@in_turn(5, LOSSES)
def test_spare_replaces_a_lost_node(tmp_path: Path, breakable: Path, calm: Outcome) -> None:
    """The job has its nodes exclusively. With shared nodes, Slurm 22.05 would start the next
    element of the array when it removes a lost node from an element with --no-kill.
    """
    spares = paced.cluster(tmp_path, spares=1, extra_lines=["--exclusive"])
    trial = paced.start(tmp_path, cluster={**spares, "lease_ttl_s": 20})

    def lose() -> None:
        batch = node(trial, "supervisor")
        names = {node_of(pid) for pid in processes(trial.witness.paths.run)["agent"]}
        kill_node(breakable, trial.witness.paths.run, (names - {batch}).pop())

    assert paced.after(trial, lose) == "next round"
    paced.same(trial, calm)
