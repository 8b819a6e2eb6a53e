"""Workers in containers of the real Apptainer get Slurm's signals. Skipped if Apptainer is not
installed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import apptainer, paced
from tests.support.nodes import NO_USER_SIGNAL, preempt, private_bed, wait_for_empty_queue
from tests.support.trials import kill_one, processes, wait_until

pytestmark = pytest.mark.long
STEPS = 3


@pytest.mark.parametrize(
    "options",
    [pytest.param((), marks=pytest.mark.soak), ("--cleanenv", "--pid")],
    ids=["", "own pids"],
)
def test_preempted_container_trial_commits_within_the_grace_time(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """TERM reaches every process of the step, including those in containers.

    Then a worker is killed, and the trial cancelled.
    """
    slurm = apptainer.cluster(tmp_path, *options)
    seldom = {"every_steps": 1000, "keep_last": 9}
    with private_bed(*NO_USER_SIGNAL):
        cluster = paced.cluster(tmp_path, partition="low", **slurm)
        trial = paced.start(tmp_path, cluster=cluster, checkpoint=seldom)
        witness = trial.witness
        run = witness.paths.run
        assert trial.until("some steps", lambda: len(witness.batches(1)) > STEPS)
        preempt()
        assert trial.until("the next incarnation", lambda: witness.has_trained(2))
        (commit,) = [one for one in witness.state.commits if one.incarnation == 1]
        assert commit.step == max(witness.posted[1]), "it stopped at a step and committed it"
        kill_one(run, "worker")
        assert trial.until("another in the job", lambda: witness.has_trained(3))
        assert witness.job(3) == witness.job(2)
        trial.site.slurmrl("cancel", trial.name)
        wait_for_empty_queue()
        wait_until("all processes to leave", lambda: not any(processes(run).values()))
