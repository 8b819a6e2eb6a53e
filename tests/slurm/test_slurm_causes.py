"""Trials on a real Slurm that lose processes, hosts and jobs: whatever ends them, their result
equals that of an undisturbed trial. One test for each cause, through the command line only.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slurmrl.run import events
from tests.support import paced
from tests.support.chaos_trials.causes import CAUSES, strike
from tests.support.chaos_trials.monkey import succession
from tests.support.chaos_trials.watched import Outcome, Watched
from tests.support.nodes import (
    NO_USER_SIGNAL,
    kill_daemon,
    kill_node,
    node_of,
    on_node,
    preempt,
    private_bed,
    queued,
    slurm,
    wait_for_empty_queue,
)
from tests.support.trials import Site, processes, wait_until

OTHER_JOB = ("requeue", "next link")
"""While Slurm holds a requeued element back, the next one of the array may start first."""
STEPS = 3
"""Steps that an incarnation trains before it is disturbed, which include at least one commit."""

pytestmark = pytest.mark.timeout(1800)
long = pytest.mark.long
soak = pytest.mark.soak


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The undisturbed trial of these tests, on one host without Slurm."""
    folder = tmp_path_factory.mktemp("calm")
    trial = paced.start(folder, "local", cluster={**paced.cluster(folder), "workers_per_host": 2})
    paced.hurry(trial)
    return trial.outcome()


@pytest.fixture
def bed(tmp_path: Path, slurm_bed: Any) -> Iterator[Path]:
    """The lane's bed, without running jobs."""
    yield slurm_bed.directory
    _empty_queue()


@pytest.fixture
def breakable() -> Iterator[Path]:
    """A private bed, whose nodes may be lost."""
    with private_bed() as directory:
        yield directory


def _empty_queue() -> None:
    slurm("scancel", "--user", str(os.getuid()))
    wait_for_empty_queue()


def after(trial: Watched, disturb: Callable[[], object]) -> str:
    """Disturb an incarnation that has trained for some steps; return how the next one that trains
    started.
    """
    assert trial.until("some steps", lambda: len(trial.witness.batches(trial.incarnation)) > STEPS)
    before = trial.incarnation
    disturb()
    return recovered(trial, before)


def recovered(trial: Watched, since: int) -> str:
    def trains() -> bool:
        return trial.incarnation > since and trial.witness.has_trained(trial.incarnation)

    assert trial.until(f"recovery of incarnation {since}", trains)
    return succession(trial.witness.job(since), trial.witness.job(trial.incarnation))


def same(trial: Watched, calm: Outcome) -> None:
    """Let the rest of the trial run without pauses."""
    paced.hurry(trial)
    assert calm.differences(trial.outcome()) == []
    wait_until("the chain to be gone from the queue", lambda: not queued())


@pytest.mark.parametrize(
    ("causes", "how"),
    [
        pytest.param([("worker", 0.9)], "in the job", marks=soak),
        pytest.param([("worker", 0.0), ("master", 0.0)], "in the job", marks=soak),
        pytest.param([("stop", 0.9), ("stop-master", 0.0)], "in the job", marks=soak),
        pytest.param([("agent", 0.9), ("agent", 0.0)], "next round", marks=soak),
        ([("supervisor", 0.0)], "next link"),
    ],
    ids=["worker", "children", "hung", "agents", "batch process"],
)
def test_lost_process(
    tmp_path: Path, bed: Path, calm: Outcome, causes: list[tuple[str, float]], how: str
) -> None:
    """Several causes, one after the other, in one trial."""
    trial = paced.start(tmp_path)
    run = trial.witness.paths.run
    for name, choice in causes:
        strikes = partial(strike, CAUSES[name], run, choice, trial.over)
        assert (name, after(trial, strikes)) == (name, how)
    same(trial, calm)


def failures(trial: Watched) -> list[tuple[str, str]]:
    """Cause and reason of each failure, as agents and master reported them."""
    return [
        (event.get("cause", ""), event["reason"])
        for event in events.read_all(trial.witness.paths)
        if event["kind"] in ("failure", "failed")
    ]


@soak
def test_job_that_puts_itself_back_into_the_queue(tmp_path: Path, bed: Path, calm: Outcome) -> None:
    """``continue: requeue`` starts the job again after a warning, but not after scancel."""
    changes = {"cluster": paced.cluster(tmp_path, **{"continue": "requeue"})}
    trial = paced.start(tmp_path, **changes)

    def job() -> str:
        return trial.witness.job(trial.incarnation).partition(".")[0]

    warn = partial(slurm, "scancel", "--batch", "--signal=USR2")
    assert after(trial, lambda: warn(job())) == "requeue"
    trained = len(trial.witness.batches(trial.incarnation))
    assert trial.until("a step", lambda: len(trial.witness.batches(trial.incarnation)) > trained)
    slurm("scancel", job())
    wait_for_empty_queue()
    ends = [event["why"] for event in events.read_all(trial.witness.paths) if "why" in event]
    assert len(ends) == 2
    assert "JobState=CANCELLED" in slurm("scontrol", "show", "job", job())
    paced.hurry(trial)
    trial.site.slurmrl("resume", trial.name)
    assert calm.differences(trial.outcome()) == []


@soak
def test_worker_that_the_kernel_kills_for_memory(tmp_path: Path, calm: Outcome) -> None:
    """A rank suddenly uses more memory than the job requested."""
    with private_bed("--memory", needs=("memory limits need",)):
        config = paced.config(tmp_path, "Hungry")
        config["cluster"] |= {"mem_per_worker": "2G"}
        trial = Watched(Site(tmp_path), config, "slurm")
        assert after(trial, (tmp_path / "feast").touch) == "in the job"
        ((cause, reason), *_) = failures(trial)
        assert cause == "oom"
        assert "was ended by SIGKILL (the kernel's OOM killer)" in reason
        same(trial, calm)
        assert "JobState=COMPLETED" in slurm("scontrol", "show", "job"), "srun has failed by then"


@soak
def test_rank_that_lives_but_never_answers(tmp_path: Path, bed: Path, calm: Outcome) -> None:
    """Its pulses continue, so only the step's deadline finds it."""
    config = {**paced.config(tmp_path, "Stuck"), "step_timeout_s": 20}
    trial = Watched(Site(tmp_path), config, "slurm")
    assert after(trial, (tmp_path / "trap").touch) == "in the job"
    assert any("waited 20 s for rank" in reason for _, reason in failures(trial))
    same(trial, calm)


@long
def test_time_limit(tmp_path: Path, bed: Path, calm: Outcome) -> None:
    """The warning comes 75 to 105 seconds into a link of two minutes; the next link resumes from
    the very step that was reached.
    """
    limit = paced.cluster(tmp_path, time="2", signal_lead_s=15)
    seldom = {"every_steps": 1000, "keep_last": 9}
    slow = paced.config(tmp_path, pause_s=5.0) | {"checkpoint": seldom}
    trial = Watched(Site(tmp_path), slow | {"cluster": limit}, "slurm")
    posted = trial.witness.posted
    assert trial.until("a step", lambda: trial.witness.has_posted(trial.incarnation, 1))
    first = trial.incarnation  # 1, unless the machine is so busy that loading takes a whole link
    assert recovered(trial, first) == "next link"
    second = trial.incarnation
    paced.hurry(trial)
    outcome = trial.outcome()
    (stop,) = [one for one in trial.witness.state.commits if one.incarnation == first]
    assert max(posted[first]) == stop.step == min(posted[second]) - 1
    assert calm.final["metrics"] == outcome.final["metrics"]
    assert calm.batches == outcome.batches


def low(folder: Path) -> dict[str, Any]:
    return paced.cluster(folder, partition="low")


@long
@pytest.mark.parametrize(
    "options", [(), pytest.param(NO_USER_SIGNAL, marks=soak)], ids=["user signal", "TERM only"]
)
def test_preemption_with_time_to_commit(
    tmp_path: Path, calm: Outcome, options: tuple[str, ...]
) -> None:
    """With the user's signal the batch process is warned; without it, only TERM and CONT reach the
    tasks of the step.
    """
    with private_bed(*options):
        trial = paced.start(
            tmp_path, cluster=low(tmp_path), checkpoint={"every_steps": 1000, "keep_last": 9}
        )
        assert after(trial, preempt) in OTHER_JOB
        paced.hurry(trial)
        outcome = trial.outcome()
        steps = [commit.step for commit in trial.witness.state.commits if commit.incarnation == 1]
        assert steps == [max(trial.witness.posted[1])], "it stopped at a step and committed it"
    assert calm.final["metrics"] == outcome.final["metrics"]
    assert calm.batches == outcome.batches


@soak
def test_preemption_without_grace(tmp_path: Path, calm: Outcome) -> None:
    """Without time for a commit, the next link resumes from the last one."""
    with private_bed():
        slurm("scontrol", "update", "PartitionName=low", "GraceTime=0")
        trial = paced.start(tmp_path, cluster=low(tmp_path))
        assert after(trial, preempt) in OTHER_JOB
        same(trial, calm)


def node(trial: Watched, role: str, index: int = -1) -> str:
    return node_of(processes(trial.witness.paths.run)[role][index])


@soak
def test_node_set_down(tmp_path: Path, breakable: Path, calm: Outcome) -> None:
    trial = paced.start(tmp_path)

    def down() -> None:
        name = node(trial, "supervisor")
        slurm("scontrol", "update", f"nodename={name}", "state=down", "reason=test")

    assert after(trial, down) in OTHER_JOB
    same(trial, calm)


@long
@pytest.mark.parametrize("first", [True, pytest.param(False, marks=soak)])
def test_lost_node(tmp_path: Path, breakable: Path, calm: Outcome, first: bool) -> None:
    """slurmd and all processes of one node disappear at once: of the batch host, or of the
    other.
    """
    trial = paced.start(tmp_path)

    def lose() -> None:
        batch = node(trial, "supervisor")
        names = {node_of(pid) for pid in processes(trial.witness.paths.run)["agent"]}
        name = batch if first else (names - {batch}).pop()
        kill_node(breakable, trial.witness.paths.run, name)

    assert after(trial, lose) in OTHER_JOB
    same(trial, calm)


@long
@pytest.mark.parametrize("stop", [True, pytest.param(False, marks=soak)])
def test_nodes_that_slurm_believes_dead_commit_nothing(
    tmp_path: Path, breakable: Path, calm: Outcome, stop: bool
) -> None:
    """The slurmd of each node dies.

    The processes of the incarnation continue to train, or are stopped as well and wake up when
    another incarnation trains elsewhere. They exit, and commit nothing from then on.
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

    assert after(trial, lose_daemons) in OTHER_JOB
    for pid in old:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    wait_until("the old incarnation to leave", lambda: not any(map(_lives, old)))
    same(trial, calm)


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("same_each_time", "incarnations", "says"),
    [
        pytest.param(True, 2, "failed twice in the same way", marks=soak),
        pytest.param(False, 3, "3 starts in a row without a new commit", marks=soak),
    ],
)
def test_code_that_fails_ends_the_trial(
    tmp_path: Path, bed: Path, same_each_time: bool, incarnations: int, says: str
) -> None:
    config = paced.config(tmp_path, "Failing", same=same_each_time)
    trial = Watched(Site(tmp_path), config, "slurm")
    trial.until("the end", lambda: False)
    status = trial.site.wait_for_end(trial.name)
    assert (status["state"], status["incarnation"]) == ("FAILED", incarnations)
    assert says in status["reason"]
    assert "LookupError: no" in status["reason"]
    assert "paced_reward.py" in status["traceback"]
    assert "paced_reward.py" in trial.site.slurmrl("status", trial.name).stdout
    wait_until("the chain to be gone from the queue", lambda: not queued())


def test_link_that_starts_after_the_end(tmp_path: Path, bed: Path) -> None:
    config = paced.config(tmp_path) | {"total_steps": 1}
    trial = Watched(Site(tmp_path), config, "slurm")
    paced.hurry(trial)
    trial.outcome()
    script = trial.witness.paths.submission_script(1, "trainer")
    late = slurm("sbatch", "--parsable", "--array=0", str(script))
    wait_until("the late link to end", lambda: not queued("-j", late))
    shown = slurm("scontrol", "show", "job", late)
    assert "JobState=COMPLETED" in shown
    assert "ExitCode=0:0" in shown
    assert trial.site.status(trial.name)["incarnation"] == 1


@soak
def test_spare_takes_the_place_of_a_lost_node(
    tmp_path: Path, breakable: Path, calm: Outcome
) -> None:
    """Nodes are not shared: Slurm (22.05) lets the next element of the array start when it takes a
    lost node from one with --no-kill, if there is room for it.
    """
    spares = paced.cluster(tmp_path, spares=1, extra_lines=["--exclusive"])
    trial = paced.start(tmp_path, cluster={**spares, "lease_ttl_s": 20})

    def lose() -> None:
        batch = node(trial, "supervisor")
        names = {node_of(pid) for pid in processes(trial.witness.paths.run)["agent"]}
        kill_node(breakable, trial.witness.paths.run, (names - {batch}).pop())

    assert after(trial, lose) == "next round"
    same(trial, calm)
