"""Trials on a real Slurm whose processes and jobs are ended have the result of an undisturbed
trial. One test for each cause, only through the command line.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from slurmrl.run import events
from tests.support import paced
from tests.support.chaos_trials.causes import CAUSES, strike
from tests.support.chaos_trials.watched import Outcome, Watched
from tests.support.nodes import (
    private_bed,
    queued,
    slurm,
    wait_for_empty_queue,
)
from tests.support.rotation import ENDS, in_turn, rotating
from tests.support.trials import Site, wait_until

pytestmark = pytest.mark.timeout(1800)
long = pytest.mark.long
soak = pytest.mark.soak


@pytest.mark.parametrize(
    ("causes", "how"),
    rotating(
        pytest.param([("worker", 0.9)], "in the job"),
        pytest.param([("worker", 0.0), ("master", 0.0)], "in the job"),
        pytest.param([("stop", 0.9), ("stop-master", 0.0)], "in the job"),
        pytest.param([("agent", 0.9), ("agent", 0.0)], "next round"),
        pytest.param([("supervisor", 0.0)], "next link"),
    ),
    ids=["worker", "children", "hung", "agents", "batch process"],
)
def test_killed_process_is_reported_as_the_cause(
    tmp_path: Path, bed: Path, calm: Outcome, causes: list[tuple[str, float]], how: str
) -> None:
    """Covers several causes in one trial."""
    trial = paced.start(tmp_path)
    run = trial.witness.paths.run
    for name, choice in causes:
        strikes = partial(strike, CAUSES[name], run, choice, trial.over)
        assert (name, paced.after(trial, strikes)) == (name, how)
    paced.same(trial, calm)


def failures(trial: Watched) -> list[tuple[str, str]]:
    """Return the cause and reason of each failure from the reports of agents and master."""
    return [
        (event.get("cause", ""), event["reason"])
        for event in events.read_all(trial.witness.paths)
        if event["kind"] in ("failure", "failed")
    ]


@soak
def test_warned_job_is_requeued_but_cancelled_job_is_not(
    tmp_path: Path, bed: Path, calm: Outcome
) -> None:
    """``continue: requeue`` starts the job again after a warning, but not after scancel."""
    changes = {"cluster": paced.cluster(tmp_path, **{"continue": "requeue"})}
    trial = paced.start(tmp_path, **changes)

    def job() -> str:
        return trial.witness.job(trial.incarnation).partition(".")[0]

    warn = partial(slurm, "scancel", "--batch", "--signal=USR2")
    assert paced.after(trial, lambda: warn(job())) == "requeue"
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
def test_oom_kill_is_reported_as_the_cause(tmp_path: Path, calm: Outcome) -> None:
    """A rank suddenly uses more memory than the job requested."""
    with private_bed("--memory", needs=("memory limits need",)):
        config = paced.config(tmp_path, "Hungry")
        config["cluster"] |= {"mem_per_worker": "2G"}
        trial = Watched(Site(tmp_path), config, "slurm")
        assert paced.after(trial, (tmp_path / "feast").touch) == "in the job"
        ((cause, reason), *_) = failures(trial)
        assert cause == "oom"
        assert "was ended by SIGKILL (the kernel's OOM killer)" in reason
        paced.same(trial, calm)
        assert "JobState=COMPLETED" in slurm("scontrol", "show", "job"), "srun has failed by then"


@soak
def test_hanging_rank_is_reported_as_the_cause(tmp_path: Path, bed: Path, calm: Outcome) -> None:
    """Its heartbeats continue, so only the step's deadline detects it."""
    config = {**paced.config(tmp_path, "Stuck"), "step_timeout_s": 20}
    trial = Watched(Site(tmp_path), config, "slurm")
    assert paced.after(trial, (tmp_path / "trap").touch) == "in the job"
    assert any("waited 20 s for rank" in reason for _, reason in failures(trial))
    paced.same(trial, calm)


@long
@in_turn(0, ENDS)
def test_time_limit_is_reported_as_the_cause(tmp_path: Path, bed: Path, calm: Outcome) -> None:
    """The warning comes 75 to 105 seconds after the start of a link of two minutes. The next link
    resumes from the last step.
    """
    limit = paced.cluster(tmp_path, time="2", signal_lead_s=15)
    seldom = {"every_steps": 1000, "keep_last": 9}
    slow = paced.config(tmp_path, pause_s=10.0) | {"checkpoint": seldom}
    trial = Watched(Site(tmp_path), slow | {"cluster": limit}, "slurm")
    posted = trial.witness.posted
    assert trial.until("a step", lambda: trial.witness.has_posted(trial.incarnation, 1))
    first = trial.incarnation  # 1, unless the machine is so busy that loading takes a whole link
    assert paced.recovered(trial, first) == "next link"
    second = trial.incarnation
    paced.hurry(trial)
    outcome = trial.outcome()
    (stop,) = [one for one in trial.witness.state.commits if one.incarnation == first]
    assert max(posted[first]) == stop.step == min(posted[second]) - 1
    assert calm.final["metrics"] == outcome.final["metrics"]
    assert calm.batches == outcome.batches


@pytest.mark.parametrize(
    ("same_each_time", "incarnations", "says"),
    [
        pytest.param(True, 2, "failed twice in the same way", marks=soak),
        pytest.param(False, 3, "3 starts in a row without a new commit", marks=soak),
    ],
)
def test_failing_code_ends_the_trial(
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


def test_job_that_starts_after_the_end_exits(tmp_path: Path, bed: Path) -> None:
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
