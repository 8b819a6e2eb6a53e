"""The decision which job continues a trial. Slurm is scripted; tests/slurm has the real one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import cast

import pytest

from slurmrl.errors import CorruptFileError, SchedulerError
from slurmrl.name_resolve.store import NameStore
from slurmrl.run import keys
from slurmrl.run.events import EventWriter, read_all
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import end
from slurmrl.run.lease import Lease
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.chain import Link
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.slurm import SlurmScheduler
from slurmrl.scheduler.states import QueueRow
from slurmrl.workers.link import (
    ENDS_S,
    LOOK_S,
    LeaderLock,
    Left,
    read_turn,
    starts_put_back,
    wait_for_turn,
)


def row(raw: str, restarts: int, hosts: tuple[str, ...] = ()) -> QueueRow:
    return QueueRow("41", (0,), raw, hosts, "", "", restarts=restarts)


class Cluster(SlurmScheduler):
    """A cluster with the state of each element, which records its commands."""

    def __init__(self, now: dict[str, QueueRow | None]) -> None:
        self.client = cast(SlurmClient, self)
        self.now = now
        self.silent = self.refuses = False
        self.done: list[str] = []

    def row_of(self, element: str) -> QueueRow | None:
        if self.silent:
            raise SchedulerError("no answer")
        return self.now[element]

    def recover(self, run: RunPaths, number: int) -> dict[str, tuple[str, ...]]:
        return {"trainer": ("41",)}

    def throttle(self, job: str, count: int) -> None:
        self.done.append(f"throttle {job} {count}")

    def requeue(self, element: str) -> None:
        if self.refuses:
            raise SchedulerError("access denied")
        self.done.append(f"requeue {element}")


@pytest.fixture
def names(paths: RunPaths) -> NameStore:
    paths.submission(1).mkdir()
    request = {"scheduler": "slurm", "total_steps": 4, "heartbeat_s": 1.0}
    paths.submission_request(1).write_text(json.dumps(request))
    return NameStore(paths.names)


def link(paths: RunPaths, job: str = "41", index: int = 0, restart: int = 0) -> Link:
    return Link(paths, 1, "trainer", job, index, restart)


def lock(
    paths: RunPaths, names: NameStore, of: Link, start: str, cluster: SlurmScheduler
) -> LeaderLock:
    return LeaderLock(paths, names, of, start, "n0", cluster, lease_ttl_s=0.05)


RUNS = row("RUNNING", 0, ("n0", "n1"))


def test_only_one_of_several_running_jobs_continues(paths: RunPaths, names: NameStore) -> None:
    cluster = Cluster({"41_0": RUNS})
    assert lock(paths, names, link(paths), "41.0", cluster).take() is None
    holder = lock(paths, names, link(paths, index=1), "42.0", cluster).take()
    assert holder is not None
    assert (holder.element, holder.start) == ("41_0", "41.0")
    assert lock(paths, names, link(paths), "41.0", cluster).take() is None, "it has it already"


@pytest.mark.parametrize(
    ("now", "left"),
    [
        (None, Left.ENDED),
        (row("FAILED", 0), Left.ENDED),
        (row("COMPLETING", 0), Left.ENDED),
        (row("NODE_FAIL", 0), Left.PUT_BACK),
        (row("PENDING", 1), Left.PUT_BACK),
        (row("RUNNING", 1, ("n0", "n1")), Left.PUT_BACK),
        (row("RUNNING", 0, ("n1", "n2")), Left.PUT_BACK),
    ],
)
def test_next_job_takes_over_from_a_job_that_exited(
    paths: RunPaths, names: NameStore, now: QueueRow | None, left: Left
) -> None:
    cluster = Cluster({"41_0": now})
    assert lock(paths, names, link(paths), "41.0", cluster).take() is None
    assert lock(paths, names, link(paths, index=1), "42.0", cluster).take() is None
    turn = read_turn(names, 2)
    assert turn is not None
    assert (turn.element, turn.before, turn.left) == ("41_1", "41.0", left)
    assert starts_put_back(names) == ({"41.0"} if left is Left.PUT_BACK else set())


def test_restarted_job_takes_over_its_own_lock(paths: RunPaths, names: NameStore) -> None:
    cluster = Cluster({"41_0": RUNS})
    for restart in (0, 1):
        assert lock(paths, names, link(paths), f"41.{restart}", cluster).take() is None
    assert starts_put_back(names) == {"41.0"}


CLAIM = {
    "group": "trainer",
    "task": 0,
    "attempt": 0,
    "host": "n0",
    "job": "41.0.0",
    "job_id": "41_0",
}


@pytest.mark.parametrize("beats", [True, False])
@pytest.mark.parametrize("said_end", [True, False])
def test_lease_decides_about_the_lock_holder_if_slurm_does_not_answer(
    paths: RunPaths, names: NameStore, beats: bool, said_end: bool
) -> None:
    cluster = Cluster({})
    assert lock(paths, names, link(paths), "41.0", cluster).take() is None
    cluster.silent = True
    names.add(keys.attempt("trainer", 0, 0), json.dumps(CLAIM))
    lease = Lease(paths.lease("trainer", 0, 0))
    lease.beat()
    if said_end:
        EventWriter(paths, "supervisor.trainer.41.0").write("end", code=0, why="")

    def sleep(seconds: float) -> None:
        if beats:
            lease.beat()

    other = LeaderLock(
        paths, names, link(paths, index=1), "42.0", "n0", cluster, lease_ttl_s=0.05, sleep=sleep
    )
    assert (other.take() is not None) == (beats and not said_end)


def turns(
    paths: RunPaths, names: NameStore, of: Link, cluster: Cluster
) -> tuple[bool, list[float]]:
    """Return whether it is this link's turn while 41_0 runs, and the time that it waited."""
    lock(paths, names, link(paths), "41.0", cluster).take()
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 10:
            cluster.now["41_0"] = None

    its = lock(paths, names, of, f"43.{of.restart}", cluster)
    events = EventWriter(paths, "supervisor.trainer.43.0")
    return wait_for_turn(its, of, cluster, events, sleep), waited


def test_second_running_job_is_requeued(paths: RunPaths, names: NameStore) -> None:
    cluster = Cluster({"41_0": RUNS})
    assert turns(paths, names, link(paths, index=2), cluster) == (False, [ENDS_S])
    assert cluster.done == ["throttle 41 1", "requeue 41_2"]
    (event,) = [one for one in read_all(paths) if one["kind"] == "surplus"]
    assert (event["job"], event["holder"]) == ("41_2", "41_0")


def test_wait_before_each_requeue_grows(paths: RunPaths, names: NameStore) -> None:
    cluster = Cluster({"41_0": RUNS})
    its = link(paths, index=2, restart=3)
    assert turns(paths, names, its, cluster) == (False, [LOOK_S] * 3 + [ENDS_S])


def test_second_job_waits_if_it_cannot_be_requeued(paths: RunPaths, names: NameStore) -> None:
    cluster = Cluster({"41_0": RUNS})
    cluster.refuses = True
    assert turns(paths, names, link(paths, index=2), cluster) == (True, [LOOK_S] * 10)


def test_job_submitted_by_hand_exits(paths: RunPaths, names: NameStore) -> None:
    cluster = Cluster({"41_0": RUNS})
    assert turns(paths, names, link(paths, job="99"), cluster) == (False, [])
    assert cluster.done == []


def test_waiting_job_exits_if_the_trial_ends(paths: RunPaths, names: NameStore) -> None:
    cluster = Cluster({"41_0": RUNS})
    cluster.refuses = True
    end(History(paths.history), Kind.CANCELLED, {})
    assert turns(paths, names, link(paths, index=2), cluster) == (False, [])


@pytest.mark.parametrize("text", ["[]", '{"start": "41"}', '{"start":"a","element":"b"}'])
def test_leader_lock_in_another_format_is_taken_over(
    paths: RunPaths, names: NameStore, text: str
) -> None:
    names.add(keys.leader_lock(1), text)
    with pytest.raises(CorruptFileError, match="baton/1"):
        read_turn(names, 1)
    assert starts_put_back(names) == set()
    assert lock(paths, names, link(paths), "41.0", Cluster({})).take() is None
    turn = read_turn(names, 2)
    assert turn is not None
    assert turn.start == "41.0"


def test_copy_of_a_trial_does_not_wait_for_the_job_of_the_original(
    paths: RunPaths, names: NameStore, tmp_path: Path
) -> None:
    """Otherwise it would be requeued again and again while the original runs."""
    cluster = Cluster({"41_0": RUNS, "43_0": row("RUNNING", 0, ("n0",))})
    assert lock(paths, names, link(paths), "41.0", cluster).take() is None
    paths.config.touch()
    copy = RunPaths(tmp_path / "copy")
    shutil.copytree(paths.run, copy.run)
    there = NameStore(copy.names)
    assert lock(copy, there, link(copy, "43"), "43.0", cluster).take() is None
    turn = read_turn(there, 2)
    assert turn is not None
    assert (turn.start, turn.run) == ("43.0", str(copy.run))
    holder = lock(paths, names, link(paths, index=1), "42.0", cluster).take()
    assert holder is not None, "the original's own jobs still wait for each other"
