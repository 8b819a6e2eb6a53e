"""Two agents of one job on this machine, started as srun starts them. A failure on one host ends
the incarnation on both. Agents of another group come and go.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from slurmrl.desk.proposal import prepare, propose
from slurmrl.fsio import documents
from slurmrl.name_resolve.store import NameStore
from slurmrl.run import keys
from slurmrl.run.channel.message_log import LogReader
from slurmrl.run.events import read_all
from slurmrl.run.history.slots import History, Kind
from slurmrl.run.history.state import fold
from slurmrl.run.paths import RunPaths
from slurmrl.workers.agent.__main__ import AGAIN, FAILED, OK
from slurmrl.workers.rollout_messages import (
    RESULT_LOG,
    Leaving,
    RolloutCounts,
    RolloutResult,
)
from tests.support.idle_world import WORKER
from tests.support.rotation import HANGS, in_turn
from tests.support.trials import REPOSITORY, Site, processes, sft_config, wait_until

LEAVE_S = 120.0


class Job:
    """A trial on two hosts with one worker each, and possible tasks of a group "rollout" with two
    idle workers each. The test plays the supervisor of all agents.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int = 100_000,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        """``settings``: additional settings of ``cluster``."""
        site = self.site = Site(folder)
        self._environment = environment or {}
        cluster = {
            "hosts": 2,
            "workers_per_host": 1,
            "gpus_per_worker": 0,
            "interface": "lo",
            "lease_ttl_s": 20,
            **settings,
        }
        config = sft_config(total_steps=steps, cluster=cluster, checkpoint={"every_seconds": 1})
        path = site.write("config.yaml", config)
        proposal = propose(path, [], root=str(site.root), scheduler="slurm")
        change = {"name": "rollout", "elastic": True, "workers_per_host": 2, "worker": WORKER}
        rollout = proposal.plan.trainers.model_copy(update=change)
        plan = proposal.plan.model_copy(update={"groups": (*proposal.plan.groups, rollout)})
        prepare(proposal.paths, proposal.settings, plan, proposal.recorder)
        self.paths: RunPaths = proposal.paths
        self.agents = [self.start(task) for task in range(proposal.plan.trainers.hosts)]

    def start(self, task: int, group: str = "trainer") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "slurmrl.workers.agent"]
        command += ["--run", str(self.paths.run), "--submission", "1", "--group", group]
        fixed = group == "trainer"
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "SLURM_JOB_ID": "41" if fixed else str(50 + task),
            "SLURM_NODEID": str(task if fixed else 0),
            "SLURM_ARRAY_TASK_ID": str(0 if fixed else task),
            "SLURMD_NODENAME": f"{'n' if fixed else 'r'}{task}",
            **self._environment,
        }
        return subprocess.Popen(command, env=environment)

    def results(self, attempt: int) -> list[RolloutResult]:
        """Return the messages of an attempt of task 0 of the group to the master."""
        log = LogReader(self.paths.rollout_results("rollout", 0, attempt))
        return [RESULT_LOG.from_json(values) for values in log.read()]

    def served(self, attempt: int, incarnation: int) -> float:
        """Return the pid of the task's worker when it serves the incarnation."""

        def pid() -> float | None:
            told = [
                said.counts for said in self.results(attempt) if isinstance(said, RolloutCounts)
            ]
            found = [counts["pid"] for counts in told if counts["incarnation"] == incarnation]
            return found[0] if found else None

        return wait_until(f"a worker that serves incarnation {incarnation}", pid, 240)

    def wait_for_event(self, kind: str, count: int) -> list[dict[str, Any]]:
        """Return the events of a kind when there are this many."""

        def found() -> list[dict[str, Any]]:
            events = [event for event in read_all(self.paths) if event["kind"] == kind]
            return events if len(events) >= count else []

        return wait_until(f"event {count} of kind {kind}", found, 240)

    @property
    def incarnation(self) -> int:
        return fold(History(self.paths.history).read()).incarnation

    def wait_for_commit_of(self, incarnation: int) -> None:
        def committed() -> bool:
            records = History(self.paths.history).read()
            return any(r.kind is Kind.COMMIT and r.incarnation == incarnation for r in records)

        wait_until(f"a commit of incarnation {incarnation}", committed, 240)

    def failure(self, incarnation: int) -> dict[str, Any]:
        key = keys.failure(incarnation)
        return documents.parse(NameStore(self.paths.names).get(key), key)

    def stop_in_a_collective(self) -> None:
        """Stop the rank of host 1 while the rank of host 0 waits for it in a collective. If it
        stopped elsewhere, continue it and try again.
        """
        names = NameStore(self.paths.names)
        worker = self.child(1, "worker")

        def is_awaited() -> bool:
            rows = documents.parse(names.get(keys.status()), keys.status())["doing"]
            waits = [row["collective"] for row in rows if row["ranks"] == "0" and row["collective"]]
            return any(collective["since_s"] > 2 for collective in waits)

        def stopped() -> bool:
            os.kill(worker, signal.SIGSTOP)
            for _ in range(80):
                if is_awaited():
                    return True
                time.sleep(0.1)
            os.kill(worker, signal.SIGCONT)
            return False

        wait_until("rank 0 in a collective without rank 1", stopped, 120)

    def child(self, task: int, role: str) -> int:
        """The worker or the master of a host."""
        agents = {parent: agent.pid for parent, agent in enumerate(self.agents)}
        for pid in processes(self.paths.run)[role]:
            lineage = ancestors(pid)
            if agents[task] in lineage:
                return pid
        raise AssertionError(f"host {task} has no {role}")

    def kill(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()
        wait_until("all processes to leave", lambda: not any(processes(self.paths.run).values()))

    def end(self) -> list[int]:
        """Tell the agents that the job ends. Return their exit codes."""
        for agent in self.agents:
            agent.send_signal(signal.SIGUSR2)
        return [agent.wait(LEAVE_S) for agent in self.agents]


SHARED = REPOSITORY / "tests" / "support" / "shared_directory"


def on_a_shared_directory(folder: Path, *, cut_off: bool) -> tuple[dict[str, Any], set[str]]:
    """Return the outcome of a trial, and which of its programs reacted to wake-ups."""
    received = folder / "received"
    received.mkdir(parents=True)
    environment = {"PYTHONPATH": f"{SHARED}:{REPOSITORY}", "SLURMRL_TEST_WAKEUPS": str(received)}
    if cut_off:
        environment["SLURMRL_TEST_CUT_OFF"] = "1"
    job = Job(folder, steps=6, environment=environment)
    try:
        assert [agent.wait(LEAVE_S) for agent in job.agents] == [OK, OK]
        return job.site.outcome("sft/1"), {file.name for file in received.iterdir()}
    finally:
        job.kill()


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        stat = Path(f"/proc/{pid}/stat").read_text()
        pid = int(stat.rpartition(")")[2].split()[1])
        found.append(pid)
    return found


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    found = Job(tmp_path, **getattr(request, "param", {}))
    yield found
    found.kill()


def test_failure_on_one_host_ends_the_incarnation_on_both(job: Job) -> None:
    job.wait_for_commit_of(1)
    job.agents[0].send_signal(signal.SIGSTOP)  # its worker fails, too; the first to say so counts
    os.kill(job.child(1, "worker"), signal.SIGKILL)
    names = NameStore(job.paths.names)
    wait_until(
        "the failure of rank 1", lambda: keys.failure(1) in names.find_subtree("incarnation/1")
    )
    job.agents[0].send_signal(signal.SIGCONT)
    job.wait_for_commit_of(2)
    assert job.failure(1) == {
        "cause": "died",
        "reason": "rank 1 on n1 was ended by SIGKILL",
        "host": "n1",
        "rank": 1,
        "exit_code": -9,
    }
    os.kill(job.child(0, "master"), signal.SIGKILL)
    job.wait_for_commit_of(3)
    assert job.failure(2)["cause"] == "master"
    assert job.end() == [OK, OK]
    state = fold(History(job.paths.history).read())
    assert state.incarnation == 3
    told = [event for event in read_all(job.paths) if event["kind"] == "failure"]
    assert [(event["writer"], event["incarnation"]) for event in told] == [
        ("agent.trainer.1.0", 1),
        ("agent.trainer.0.0", 2),
    ]


@pytest.mark.soak
def test_notifications_change_only_when_messages_are_read(tmp_path: Path) -> None:
    """Agents and master react to wake-ups. If all wake-ups are lost, the trial has the
    same bits.
    """
    announced, heeded = on_a_shared_directory(tmp_path / "announced", cut_off=False)
    assert heeded == {"agent", "master"}
    polled, heeded = on_a_shared_directory(tmp_path / "polled", cut_off=True)
    assert heeded == set()
    assert announced == polled


@pytest.mark.long
@in_turn(0, 2)
def test_lost_host_ends_the_round(job: Job) -> None:
    """The host stops answering, and its ranks end with it."""
    job.wait_for_commit_of(1)
    job.agents[1].kill()
    assert job.agents[0].wait(LEAVE_S) == AGAIN
    lost = NameStore(job.paths.names).get(keys.lost("n1"))
    said = documents.parse(lost, "lost")
    assert said["job"] == "41.0.0"
    first = job.failure(fold(History(job.paths.history).read()).incarnation)
    assert (first["cause"], first["host"]) == ("lost_host", "n1")


@pytest.mark.long
@in_turn(4, HANGS)
@pytest.mark.parametrize("job", [{"silence_s": 20, "heartbeat_s": 0.5}], indirect=True)
def test_hang_on_one_host_is_explained_with_stacks_of_both(job: Job) -> None:
    """The rank on the other host waits in a collective. Its stacks are collected before the stopped
    rank is killed, because after that it fails with a broken connection.
    """
    job.wait_for_commit_of(1)
    job.stop_in_a_collective()
    job.wait_for_commit_of(2)
    failure = job.failure(1)
    assert (failure["cause"], failure["host"], failure["rank"]) == ("hung", "n1", 1)
    names = NameStore(job.paths.names)
    hang = documents.parse(names.get(keys.hang(1)), "hang")
    assert hang["text"].startswith("rank 0 has waited")
    assert "for rank 1, which has sent no heartbeat for" in hang["text"]
    assert sorted(hang["files"]) == [f"logs/trainer/{task}.0.stacks-1.0.txt" for task in range(2)]
    waiting, stopped = [(job.paths.run / file).read_text() for file in sorted(hang["files"])]
    assert "=== rank 0 on n0: has waited" in waiting
    assert "distributed_c10d.py" in waiting
    assert "=== the master" in waiting
    assert "=== rank 1 on n1: has sent no heartbeat for" in stopped
    assert "it is stopped (SIGSTOP)" in stopped
    assert job.end() == [OK, OK]


@pytest.mark.long
@in_turn(1, 2)
@pytest.mark.parametrize(
    "job", [{"hosts": 1, "workers_per_host": 2, "heartbeat_s": 0.5}], indirect=True
)
def test_rollout_tasks_join_and_leave_next_to_the_trainers(job: Job) -> None:
    """Task 0 of another group starts no master and has its own world of ranks. Neither a failure of
    its ranks, nor the loss of its host, nor the end of its job affects the trainers' incarnation.
    Its workers also serve the next incarnation.
    """
    job.wait_for_commit_of(1)
    task = job.start(0, "rollout")
    job.agents.append(task)
    assert job.served(0, 1)
    (ready,) = job.wait_for_event("world_ready", 1)
    assert ready["world"] == "rollout/0"
    assert len(processes(job.paths.run)["master"]) == 1
    workers = [pid for pid in processes(job.paths.run)["worker"] if task.pid in ancestors(pid)]
    os.kill(workers[1], signal.SIGKILL)
    assert task.wait(LEAVE_S) == FAILED
    failures = [event for event in read_all(job.paths) if event["kind"] == "failure"]
    assert failures[-1]["reason"].endswith("of rollout/0 on r0 was ended by SIGKILL")
    assert "of rollout/0" in (job.paths.logs / "rollout" / "0.0.log").read_text()

    task = job.start(0, "rollout")
    job.agents.append(task)
    assert job.served(1, 1)
    task.kill()
    task.wait(LEAVE_S)

    task = job.start(0, "rollout")
    job.agents.append(task)
    worker = job.served(2, 1)
    names = NameStore(job.paths.names)
    assert job.incarnation == 1, "the trainers were left alone"
    assert keys.failure(1) not in names.find_subtree("incarnation/1")
    assert keys.lost("r0") not in names.find_subtree("lost")
    os.kill(job.child(0, "master"), signal.SIGKILL)
    assert job.served(2, 2) == worker
    assert job.incarnation == 2

    task.send_signal(signal.SIGUSR2)
    assert task.wait(LEAVE_S) == OK
    assert isinstance(job.results(2)[-1], Leaving)
    job.wait_for_commit_of(2)
    assert job.agents[0].poll() is None
    job.agents[0].send_signal(signal.SIGUSR2)
    assert job.agents[0].wait(LEAVE_S) == OK
    assert job.incarnation == 2
