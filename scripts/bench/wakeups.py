#!/usr/bin/env python3
"""Measure how late the end of a call is noticed on a shared file system, with and without wake-ups.

scripts/bench/wakeups.py [--agents 8] [--workers 2] [--steps 4] [--pace 100 --pace 1000 ...]

Agents are forked processes with the log reader, the log and the socket of a real agent. A worker is
a process that sleeps for the duration of a call. The master is the real `WorkerChannel`. No process
uses inotify; polls have the intervals of a trial on ``--pace`` hosts. The loss of a step is its
duration minus the time that its slowest worker spends in calls. The table has the median loss, with
the minimum and the maximum in brackets. A look of the master is one read of an agent's log, which
takes three file operations.

The program also measures how long the master takes to wake 1,000 agents.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from forks import fork

from slurmrl.fsio.atomic import make_private_directory
from slurmrl.plan.model import GroupPlan, Plan
from slurmrl.run.channel import follower
from slurmrl.run.channel.follower import Follower
from slurmrl.run.channel.message_log import LogReader, LogWriter, Message
from slurmrl.run.channel.pipe import Connection
from slurmrl.run.channel.wakeups import WakeupSocket
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Identity
from slurmrl.workers.agent.incarnation import Replies
from slurmrl.workers.master import worker_channel
from slurmrl.workers.master.worker_channel import WorkerChannel
from slurmrl.workers.messages import (
    CONTROL_LOG,
    FROM_WORKER,
    TO_WORKER,
    Done,
    Exit,
    Hello,
    RunCall,
    WakeMaster,
)
from slurmrl.workers.polling import PollIntervals

GROUP = "trainer"
LOOPBACK = "127.0.0.1"
HEARTBEAT_S = 2.0
TIMEOUT_S = 600.0
WOKEN_AT_ONCE = 1000


class Counted(LogReader):
    """A log reader that counts its reads."""

    reads = 0

    def read(self) -> list[Message]:
        Counted.reads += 1
        return super().read()


def worker(pipe: Connection, rank: int) -> None:
    while (message := pipe.receive(timeout_s=None)) is not None:
        began = time.perf_counter()
        call = TO_WORKER.from_json(message)
        assert isinstance(call, RunCall)
        time.sleep(call.scalars["sleep_s"])
        seconds = time.perf_counter() - began
        pipe.send(FROM_WORKER.to_json(Done(rank=rank, seq=call.seq, seconds=seconds)))


class Agent:
    """Run the loop of an agent (`Incarnation._relay`) without its other work."""

    def __init__(self, paths: RunPaths, task: int, workers: int, poll_s: float, sends: bool):
        self.wakeups = WakeupSocket(LOOPBACK) if sends else None
        self.replies = Replies(LogWriter(paths.agent_log(1, GROUP, task)), workers, self.wakeups)
        self.pipes: list[Connection] = []
        self.passed_on = -1
        for number in range(workers):
            ours, theirs = Connection.pair()
            self.pipes.append(ours)
            fork(lambda: self.work(theirs, task * workers + number))  # noqa: B023 - it runs at once
            theirs.close()
        self.master = Follower(
            [LogReader(paths.master_log(1))],
            paths.control,
            longest_poll_s=poll_s,
            wakeups=self.wakeups,
        )
        identity = Identity(GROUP, task, attempt=0, host=f"n{task}", job="1", job_id="1")
        where = self.wakeups.address if self.wakeups is not None else None
        self.replies.send(Hello(agent=identity, wakeups=where))

    def work(self, pipe: Connection, rank: int) -> None:
        """Run a worker. It closes the agent's ends of the pipes, so it ends with the agent."""
        for ours in self.pipes:
            ours.close()
        worker(pipe, rank)

    def serve(self) -> None:
        while True:
            for order in map(CONTROL_LOG.from_json, self.master.read_due()):
                if isinstance(order, WakeMaster):
                    self.replies.wake_at(order.wakeups)
                    self.master.listen_for(order.wakeups.source, 0)
                elif isinstance(order, Exit):
                    return
                else:
                    self.passed_on = order.seq
                    for pipe in self.pipes:
                        pipe.send(TO_WORKER.to_json(order))
            while not self.master.woken and self.master.pause_s() > 0:
                self.turn()

    def turn(self) -> None:
        timeout_s = min(self.master.pause_s(), self.replies.answers.wait_s())
        poller = select.poll()
        for listener in (*self.pipes, *([self.wakeups] if self.wakeups is not None else [])):
            poller.register(listener.fileno(), select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(timeout_s * 1000)}
        if self.wakeups is not None and self.wakeups.fileno() in ready:
            self.master.drain()
        received = [
            FROM_WORKER.from_json(answer)
            for pipe in self.pipes
            if pipe.fileno() in ready
            for answer in pipe.receive_available()
        ]
        answers = [answer for answer in received if isinstance(answer, Done)]
        sent = self.replies.answers.take(answers)
        self.replies.send(*sent)
        if any(isinstance(a, Done) and a.seq == self.passed_on for a in sent):
            self.master.expect_news()


def lost_wakeup(wakeups: WakeupSocket, others: object) -> None:
    """Replace `WakeupSocket.wake` if wake-ups are lost."""


def a_plan(agents: int, workers: int) -> Plan:
    group = GroupPlan(
        hosts=agents,
        workers_per_host=workers,
        gpus_per_worker=0,
        threads_per_worker=1,
        cpus_per_worker=1,
        links=1,
    )
    return Plan(
        experiment="wakeups", trial="1", groups=(group,), models={}, calls=(), evaluation_calls=()
    )


def a_step(channel: WorkerChannel, seconds: list[float]) -> tuple[float, float]:
    """Run a step. Return its seconds and the seconds of its slowest worker."""
    began = time.perf_counter()
    calls = (RunCall(step=1, name="call", scalars={"sleep_s": each}) for each in seconds)
    numbers = channel.post(*calls)
    worked_s: dict[int, float] = defaultdict(float)
    for number in numbers:
        for rank, answer in channel.collect(number, "a call", TIMEOUT_S).items():
            worked_s[rank] += answer.seconds
    return time.perf_counter() - began, max(worked_s.values())


def measure(options: argparse.Namespace, pace: int, *, sends: bool) -> str:
    poll_s = PollIntervals.of(pace, HEARTBEAT_S).poll_s
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        paths = RunPaths(Path(folder) / "run")
        for directory in paths.directories():
            make_private_directory(directory)
        plan = a_plan(options.agents, options.workers)
        wakeups = WakeupSocket(LOOPBACK) if sends else None
        channel = WorkerChannel(
            paths, plan, 1, lambda: None, longest_poll_s=poll_s, wakeups=wakeups
        )
        agents = [
            fork(lambda: Agent(paths, task, options.workers, poll_s, sends).serve())  # noqa: B023
            for task in range(options.agents)
        ]
        for _ in range(3):
            a_step(channel, [0.0])  # all agents have joined
        calls = options.calls * [options.step_s / options.calls]
        Counted.reads = 0
        times = [a_step(channel, [0.0, *calls]) for _ in range(options.steps)]
        reads = Counted.reads / options.steps
        channel.post(Exit())
        for pid in agents:
            os.waitpid(pid, 0)
        if wakeups is not None:
            wakeups.close()
    losses = [100 * (took_s / worked_s - 1) for took_s, worked_s in times]
    return (
        f"loss {statistics.median(losses):6.2f} % ({min(losses):.2f} to {max(losses):.2f})"
        f"   looks of the master per step and agent {reads / options.agents:6.1f}"
    )


def wake_many(count: int) -> float:
    """Return how long a round of wake-ups takes, in milliseconds: the median of ten."""
    ours, theirs = WakeupSocket(LOOPBACK), WakeupSocket(LOOPBACK)
    times = []
    for _ in range(10):
        began = time.perf_counter()
        ours.wake(count * [theirs.address])
        times.append(time.perf_counter() - began)
        theirs.receive()
    return 1000 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--pace", type=int, action="append")
    options = parser.parse_args()
    follower.is_local = lambda directory: False
    worker_channel.LogReader = Counted  # type: ignore[misc]
    print(
        f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; {options.agents} agents with "
        f"{options.workers} workers, {options.steps} steps of {options.step_s:g} s and "
        f"{options.calls} calls"
    )
    wake = WakeupSocket.wake
    for pace in options.pace or [100, 1000]:
        for name, sends, function in (
            ("no wake-ups", False, wake),
            ("wake-ups lost", True, lost_wakeup),
            ("wake-ups", True, wake),
        ):
            WakeupSocket.wake = function  # type: ignore[method-assign]
            print(f"{pace:6} hosts  {name:14} {measure(options, pace, sends=sends)}", flush=True)
    WakeupSocket.wake = wake  # type: ignore[method-assign]
    print(f"waking {WOKEN_AT_ONCE} agents takes {wake_many(WOKEN_AT_ONCE):.1f} ms")


if __name__ == "__main__":
    main()
