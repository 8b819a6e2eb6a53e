"""The loss of the first agent's host, from the view of the other agents."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import pytest

from slurmrl.errors import ReportedError, SchedulerError
from slurmrl.fsio import documents
from slurmrl.name_resolve.store import NameStore
from slurmrl.run import keys
from slurmrl.run.lease import Lease
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Failure, Identity
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.parse import HostRow
from slurmrl.scheduler.states import QueueRow
from slurmrl.workers.agent.loss_detection import GRACE_S, WATCHERS, Leader, leave_without

TTL_S = 20.0


@dataclass
class Bed:
    paths: RunPaths
    now: float = 0.0
    slept: list[float] = field(default_factory=list)
    failure: Failure | None = None

    def identity(self, task: int, job: str = "7.0.0") -> Identity:
        return Identity("trainer", task, 0, f"n{task}", job, "41_0", 1)

    def claims(self, attempt: int, host: str, job: str) -> Lease:
        """Start the first agent of a round."""
        names = NameStore(self.paths.names)
        identity = replace(self.identity(0, job), attempt=attempt, host=host)
        said = json.dumps(documents.to_json(identity))
        names.add(keys.attempt("trainer", 0, attempt), said)
        lease = Lease(self.paths.lease("trainer", 0, attempt))
        lease.beat()
        return lease

    def watcher(self, task: int = 1) -> Leader:
        names = NameStore(self.paths.names)
        return Leader(self.paths, names, self.identity(task), TTL_S, lambda: self.now)

    def lost(self, leader: Leader, lease: Lease | None = None) -> float | None:
        """Return the time until the watcher considers the host lost, within a limit."""
        for _ in range(100):
            self.now += 1.0
            if lease is not None:
                lease.beat()
            try:
                leader.look()
            except ReportedError as error:
                self.failure = error.failure
                return self.now
        return None


@pytest.fixture
def bed(paths: RunPaths) -> Bed:
    return Bed(paths)


def test_loss_of_the_first_agents_host_is_detected(bed: Bed) -> None:
    bed.claims(0, "n9", "7.0.1")  # of another round
    bed.claims(1, "n0", "7.0.0")
    when = bed.lost(bed.watcher())
    assert when is not None
    assert TTL_S <= when < 2 * TTL_S
    assert bed.failure is not None
    assert (bed.failure.cause, bed.failure.host) == ("lost_host", "n0")


def test_live_first_agent_is_not_reported_lost(bed: Bed) -> None:
    assert bed.lost(bed.watcher(), bed.claims(0, "n0", "7.0.0")) is None


def test_round_without_a_started_first_agent_is_not_lost(bed: Bed) -> None:
    bed.claims(0, "n0", "7.0.1")
    assert bed.lost(bed.watcher()) is None


@pytest.mark.parametrize("task", [0, WATCHERS + 1])
def test_only_few_agents_watch_the_first_agent(bed: Bed, task: int) -> None:
    bed.claims(0, "n0", "7.0.0")
    assert bed.lost(bed.watcher(task)) is None


@pytest.mark.parametrize(
    ("state", "goes_on", "waits", "does"),
    [
        ("down*", "chain", False, "requeue 41_0"),
        ("allocated*", "chain", False, "requeue 41_0"),
        ("allocated", "chain", True, "requeue 41_0"),
        ("down", "none", False, "cancel 41_0"),
    ],
)
def test_agent_requeues_the_job_if_the_batch_host_is_lost(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, state: str, goes_on: str, waits: bool, does: str
) -> None:
    """The agent waits for the time in which a living batch process would end the step."""
    done: list[str] = []
    row = HostRow("n0", state, 0)
    monkeypatch.setattr(SlurmClient, "hosts", lambda self, partition, names: [row])
    monkeypatch.setattr(SlurmClient, "requeue", lambda self, one: done.append(f"requeue {one}"))
    monkeypatch.setattr(SlurmClient, "cancel", lambda self, some: done.append(f"cancel {some[0]}"))
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "41")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    bed.paths.submission(1).mkdir()
    bed.paths.submission_request(1).write_text(json.dumps({"continue": goes_on}))
    leave_without("n0", bed.paths, 1, bed.identity(1), bed.slept.append)
    assert done == [does]
    assert sum(bed.slept) == (GRACE_S if waits else 0.0)


@pytest.mark.parametrize(
    ("answers", "rows", "does"),
    [
        pytest.param(("did not answer", ""), ("RUNNING 0",), "requeue requeue", id="no answer"),
        pytest.param(("did not answer",), ("RUNNING 1",), "requeue", id="runs again"),
        pytest.param(("did not answer",), ("PENDING 1",), "requeue", id="was requeued"),
        pytest.param(("is pending execution",), ("PENDING 1",), "requeue", id="another agent did"),
        pytest.param(
            ("not permitted",) * 3,
            ("RUNNING 0",) * 3,
            "requeue requeue requeue cancel",
            id="refused",
        ),
        pytest.param(("Zero bytes", ""), ("RUNNING 0",), "requeue requeue", id="odd answer"),
    ],
)
def test_requeue_of_a_lost_job_is_retried_until_a_later_start(
    bed: Bed,
    monkeypatch: pytest.MonkeyPatch,
    answers: tuple[str, ...],
    rows: tuple[str, ...],
    does: str,
) -> None:
    """The job holds its hosts without use. A later start of the job is not requeued."""
    done: list[str] = []
    left, queue = list(answers), list(rows)

    def requeue(self: SlurmClient, element: str) -> None:
        done.append("requeue")
        if said := left.pop(0):
            raise SchedulerError(said)

    def queued(self: SlurmClient, jobs: object) -> list[QueueRow]:
        raw, _, restarts = queue.pop(0).partition(" ")
        return [QueueRow("41", (0,), raw, (), "", "", restarts=int(restarts))]

    monkeypatch.setattr(SlurmClient, "hosts", lambda self, partition, names: [])
    monkeypatch.setattr(SlurmClient, "requeue", requeue)
    monkeypatch.setattr(SlurmClient, "queue", queued)
    monkeypatch.setattr(SlurmClient, "cancel", lambda self, some: done.append("cancel"))
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "41")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    bed.paths.submission(1).mkdir()
    bed.paths.submission_request(1).write_text("{}")
    leave_without("n0", bed.paths, 1, bed.identity(1), bed.slept.append)
    assert (" ".join(done), left, queue) == (does, [], [])


def test_agents_of_other_groups_do_not_watch_trainers(bed: Bed) -> None:
    """Only the trainers' agents react to the loss of their first host. A rollout task keeps its
    job.
    """
    lease = bed.claims(0, "n0", "7.0.0")
    names = NameStore(bed.paths.names)
    said = json.dumps({"job": "7.0.0", "host": "n0"})
    names.add(keys.attempt("rollout", 0, 0), said)
    rollout = replace(bed.identity(1), group="rollout")
    assert bed.lost(Leader(bed.paths, names, rollout, TTL_S, lambda: bed.now)) is None
    del lease
