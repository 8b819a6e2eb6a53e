"""Claims of a task: each start gets a separate attempt, even if two start at the same time."""

from __future__ import annotations

import json
from pathlib import Path

from slurmrl.name_resolve.store import NameStore
from slurmrl.run import keys
from slurmrl.run.reports import Identity
from slurmrl.workers.agent.agent_host import claim

SLURM = {
    "SLURM_JOB_ID": "47",
    "SLURM_ARRAY_JOB_ID": "45",
    "SLURM_ARRAY_TASK_ID": "2",
    "SLURM_RESTART_COUNT": "1",
    "SLURMRL_ROUND": "4",
    "SLURM_NODEID": "3",
    "SLURMD_NODENAME": "n7",
}


def test_identity_is_read_from_slurm_variables(tmp_path: Path) -> None:
    identity = claim(NameStore(tmp_path), "trainer", elastic=False, environ=SLURM)
    assert identity.task == 3
    assert identity.label == "trainer/3"
    assert identity.job == "47.1.4"
    assert identity.job_id == "45_2"
    assert identity.host == "n7"


def test_requeued_job_and_next_round_have_new_identities(tmp_path: Path) -> None:
    """The master's BEGIN names the start of the job. The BEGIN of the previous start must not
    match.
    """
    store = NameStore(tmp_path)
    first = claim(store, "trainer", elastic=False, environ=SLURM)
    second = claim(store, "trainer", elastic=False, environ={**SLURM, "SLURM_RESTART_COUNT": "2"})
    third = claim(store, "trainer", elastic=False, environ={**SLURM, "SLURMRL_ROUND": "5"})
    assert len({first.job, second.job, third.job}) == 3


def test_elastic_task_number_is_the_array_index(tmp_path: Path) -> None:
    assert claim(NameStore(tmp_path), "rollout", elastic=True, environ=SLURM).task == 2


def test_identity_without_slurm_has_task_0_a_job_and_a_host(tmp_path: Path) -> None:
    identity = claim(NameStore(tmp_path), "trainer", elastic=False, environ={})
    assert identity.task == 0
    assert identity.job
    assert identity.host


def test_attempts_count_up_per_task(tmp_path: Path) -> None:
    store = NameStore(tmp_path)
    other = {**SLURM, "SLURM_NODEID": "31"}  # a task whose number begins with the same digit

    def attempts(environ: dict[str, str], n: int) -> list[int]:
        return [claim(store, "trainer", elastic=False, environ=environ).attempt for _ in range(n)]

    assert attempts(SLURM, 3) == [0, 1, 2]
    assert attempts(other, 2) == [0, 1]
    assert attempts(SLURM, 1) == [3]
    assert claim(store, "trainer2", elastic=False, environ=SLURM).attempt == 0


def test_claim_names_its_holder_and_is_permanent(tmp_path: Path) -> None:
    store = NameStore(tmp_path)
    identity = claim(store, "trainer", elastic=False, environ=SLURM)
    said = json.loads(NameStore(tmp_path).get(keys.attempt("trainer", 3, 0)))
    assert Identity(**said) == identity


class StaleListing(NameStore):
    """File operations whose listings are empty, as a directory cache may show."""

    def find_subtree(self, root: str) -> list[str]:
        return []


def test_stale_listing_only_causes_more_attempts(tmp_path: Path) -> None:
    store = StaleListing(tmp_path)
    found = [claim(store, "trainer", elastic=False, environ=SLURM).attempt for _ in range(4)]
    assert found == [0, 1, 2, 3]


def test_trainers_share_one_world_and_each_task_has_its_own(tmp_path: Path) -> None:
    """The trainers share one world. Each task of another group has a separate world, and none of
    them is the first agent of the trial.
    """
    store = NameStore(tmp_path)
    trainer = claim(store, "trainer", elastic=False, environ={})
    rollout = claim(store, "rollout", elastic=True, environ={"SLURM_ARRAY_TASK_ID": "0"})
    assert (trainer.world, trainer.trains) == ("trainer", True)
    assert (rollout.world, rollout.trains) == ("rollout/0", False)
