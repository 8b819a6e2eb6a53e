"""The watchers of a job with spare hosts: their hosts, and the conditions for a requeue."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping

import pytest

from slurmrl.errors import SchedulerError
from slurmrl.fsio import documents
from slurmrl.name_resolve.store import NameStore
from slurmrl.run import keys
from slurmrl.run.events import read_all
from slurmrl.run.lease import Lease
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Identity
from slurmrl.scheduler.chain import Link
from slurmrl.scheduler.client import SlurmClient
from slurmrl.scheduler.states import QueueRow
from slurmrl.workers.supervisor.rounds import JobHosts
from slurmrl.workers.supervisor.watcher import ASK_S, MOST, Watcher, Watchers
from tests.support.trials import wait_until

TTL_S = 20.0
WHOLE, REST = ("n0", "n1"), ("n1",)
"""Hosts of the job with its batch host n0, and without."""
OVER = None


class Slurm:
    """A Slurm with scripted answers of squeue over time. An answer without a row, or with another
    restart count, ends the watch.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, paths: RunPaths) -> None:
        self.now = 0.0
        self.answers: Mapping[float, tuple[str, ...] | str | None] = {}
        self.lives_until = 0.0
        self.asked: list[float] = []
        self.requeued: list[tuple[float, str]] = []
        self.lease: Lease | None = None
        self._paths = paths
        monkeypatch.setattr(SlurmClient, "queue", lambda client, jobs: self._queue())
        monkeypatch.setattr(SlurmClient, "requeue", lambda client, one: self._requeue(one))
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURMD_NODENAME", "n1")
        paths.submission(1).mkdir()
        paths.submission_request(1).write_text("{}")

    def watch(self) -> None:
        link = Link(self._paths, 1, "trainer", "41", 0)
        names = NameStore(self._paths.names)
        Watcher(link, names, "n0", TTL_S, lambda: self.now).watch(self._sleep)

    def first_agent(self, round_of: str, attempt: int) -> None:
        identity = Identity("trainer", 0, attempt, "n0", round_of, "41_0", 1)
        said = json.dumps(documents.to_json(identity))
        names = NameStore(self._paths.names)
        names.add(keys.attempt("trainer", 0, attempt), said)
        self.lease = Lease(self._paths.lease("trainer", 0, attempt))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 1000.0, "it watches forever"
        if self.lease is not None and self.now <= self.lives_until:
            self.lease.beat()

    def _queue(self) -> list[QueueRow]:
        self.asked.append(self.now)
        answer = [said for since, said in self.answers.items() if since <= self.now][-1]
        if answer == "silent":
            raise SchedulerError("squeue did not answer")
        if answer is OVER:
            return []
        hosts, restarts = (WHOLE, 1) if isinstance(answer, str) else (answer, 0)
        return [QueueRow("41", (0,), "RUNNING", hosts, "", "", restarts=restarts)]

    def _requeue(self, element: str) -> None:
        self.requeued.append((self.now, element))
        self.answers = {0.0: "restarted"}


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch, paths: RunPaths) -> Slurm:
    return Slurm(monkeypatch, paths)


def test_job_is_requeued_if_the_batch_host_and_only_agent_are_lost(
    slurm: Slurm, paths: RunPaths
) -> None:
    slurm.first_agent("7.0.0", 0)
    slurm.lives_until = 200.0
    slurm.answers = {0.0: WHOLE, 290.0: REST}
    slurm.watch()
    ((when, element),) = slurm.requeued
    assert element == "41_0"
    assert 290.0 <= when <= 290.0 + ASK_S + TTL_S / 8
    assert slurm.asked[0] >= 200.0 + TTL_S / 2, "Slurm is left alone while the agent lives"
    assert min(b - a for a, b in zip(slurm.asked, slurm.asked[1:], strict=False)) >= ASK_S
    (told,) = read_all(paths)
    assert (told["kind"], told["host"], told["writer"]) == (
        "batch_host_lost", "n0", "watcher.7.0.n1",
    )  # fmt: skip


def test_job_is_requeued_if_the_batch_host_is_lost_before_agents_start(slurm: Slurm) -> None:
    """Agents of an earlier start of the job do not count."""
    slurm.first_agent("7.1.0", 0)
    slurm.lives_until = 1000.0
    slurm.answers = {0.0: WHOLE, 100.0: REST}
    slurm.watch()
    assert [element for _, element in slurm.requeued] == ["41_0"]


def test_watcher_observes_the_agents_of_the_newest_round(slurm: Slurm) -> None:
    slurm.first_agent("7.0.9", 0)
    slurm.first_agent("7.0.10", 1)
    slurm.lives_until = 500.0
    slurm.answers = {0.0: REST}
    slurm.watch()
    assert slurm.requeued[0][0] > 500.0, "the trial goes on without a batch process"


@pytest.mark.parametrize("answer", [OVER, "restarted"])
def test_watcher_of_an_earlier_job_start_does_not_requeue(slurm: Slurm, answer: str | None) -> None:
    """A watcher may outlive its start on a host that Slurm could not reach."""
    slurm.answers = {0.0: "silent", 100.0: WHOLE, 200.0: answer}
    slurm.watch()
    assert slurm.requeued == []
    assert slurm.now >= 200.0


@pytest.mark.parametrize("hosts", [(), ("n2",)])
def test_host_list_without_the_watchers_host_is_ignored(
    slurm: Slurm, hosts: tuple[str, ...]
) -> None:
    slurm.answers = {0.0: hosts, 100.0: WHOLE, 200.0: OVER}
    slurm.watch()
    assert slurm.requeued == []


@pytest.mark.parametrize(
    ("hosts", "needed", "on"),
    [
        pytest.param(("n0", "n1"), 1, ["n1"], id="one host and a spare"),
        pytest.param(("n0", "n1"), 2, [], id="no spares: Slurm ends the job itself"),
        pytest.param(tuple(f"n{i}" for i in range(8)), 7, ["n5", "n6", "n7"], id="the last ones"),
        pytest.param((), 1, [], id="no Slurm"),
    ],
)
def test_watchers_run_on_other_hosts_than_the_batch_host(
    paths: RunPaths,
    monkeypatch: pytest.MonkeyPatch,
    hosts: tuple[str, ...],
    needed: int,
    on: list[str],
) -> None:
    commands: list[list[str]] = []

    def command(its: Watchers, host: str, batch: str) -> list[str]:
        commands.append(made(its, host, batch))
        return ["sh", "-c", "trap 'exit 0' USR2; while sleep 0.1; do :; done"]

    made: Callable[[Watchers, str, str], list[str]] = Watchers._command
    monkeypatch.setattr(Watchers, "_command", command)
    monkeypatch.setenv("SLURMD_NODENAME", "n0")
    watchers = Watchers(Namespace(run=paths.run, submission=2, group="trainer"))
    watchers.start(JobHosts(paths, needed, hosts))
    steps = watchers._steps
    assert [one[one.index("--overlap") - 3] for one in commands] == [f"--nodelist={n}" for n in on]
    assert len(steps) == len(on) <= MOST
    for one in commands:
        assert one[one.index("--host") + 1] == "n0"
    watchers.end()
    wait_until("the steps to end", lambda: all(step.poll() is not None for step in steps) or None)


def test_job_without_srun_has_no_watchers(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watchers without srun would not end."""
    monkeypatch.setenv("PATH", str(paths.run))
    watchers = Watchers(Namespace(run=paths.run, submission=2, group="trainer"))
    watchers.start(JobHosts(paths, 1, ("n0", "n1")))
    watchers.end()
