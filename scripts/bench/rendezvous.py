#!/usr/bin/env python3
"""Measure the time in which many simulated hosts form an incarnation, over files and TCPStore.

scripts/bench/rendezvous.py [--directory DIR ...] [--agents 200] [--workers 5] [--rounds 5]

Agents are forked processes that all start together. Like real agents, they claim the attempt, renew
the lease, wait for the master's BEGIN, send `Hello` and report each worker as ready. The master
collects these messages. With TCPStore, every agent sets one key per worker and one address, and all
agents read these, like torchrun's rendezvous. The clients of TCPStore are connected before the
clock starts. (For its log, torch looks up the names of both ends on connection. Without a name
server that knows them, this takes time-outs of 5 s.) The script prints the seconds from the start
to the last READY that the master sees: the median of the rounds, and in brackets the minimum and
the maximum. The two ways take turns, and all processes share the machine's cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch.distributed import TCPStore

from slurmrl.backoff import Backoff
from slurmrl.fsio.atomic import make_private_directory
from slurmrl.name_resolve.store import NameStore
from slurmrl.run.channel.follower import Follower
from slurmrl.run.channel.message_log import LogReader, LogWriter
from slurmrl.run.history.slots import History
from slurmrl.run.history.state import begin, fold
from slurmrl.run.lease import Lease
from slurmrl.run.paths import RunPaths
from slurmrl.workers.agent.agent_host import claim
from slurmrl.workers.polling import PollIntervals

FORK = get_context("fork")
GROUP = "trainer"
HEARTBEAT_S = 2.0
TIMEOUT_S = 120.0


def poll(look: Callable[[], Any], intervals: PollIntervals) -> Any:
    """Wait like an agent while an incarnation begins."""
    backoff = Backoff(last_s=min(intervals.poll_s, intervals.beat_s))
    deadline = time.monotonic() + TIMEOUT_S
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise SystemExit("the rendezvous took too long")
        backoff.sleep()
    return found


def agent(paths: RunPaths, task: int, workers: int, intervals: PollIntervals, start: Any) -> None:
    start.wait()
    names = NameStore(paths.names)
    environ = {"SLURM_NODEID": str(task), "SLURM_JOB_ID": "1", "SLURMD_NODENAME": f"host{task}"}
    identity = claim(names, GROUP, elastic=False, environ=environ)
    Lease(paths.lease(GROUP, identity.task, identity.attempt)).beat()
    history = History(paths.history)
    incarnation = poll(lambda: fold(history.read()).incarnation or None, intervals)
    replies = LogWriter(paths.agent_log(incarnation, GROUP, task))
    replies.append({"type": "hello", **vars(identity)})
    ready = ({"type": "ready", "rank": task * workers + worker} for worker in range(workers))
    replies.append(*ready)


def over_files(folder: Path, agents: int, workers: int) -> float:
    paths = RunPaths(folder / "run")
    for directory in paths.directories():
        make_private_directory(directory)
    intervals = PollIntervals.of(agents, HEARTBEAT_S)
    start = FORK.Barrier(agents + 1)
    processes = [
        FORK.Process(target=agent, args=(paths, task, workers, intervals, start))
        for task in range(agents)
    ]
    for process in processes:
        process.start()
    start.wait()
    began = time.perf_counter()
    incarnation = begin(History(paths.history), {"job": "1.0"}).incarnation
    readers = [LogReader(paths.agent_log(incarnation, GROUP, task)) for task in range(agents)]
    follower = Follower(readers, paths.control, longest_poll_s=intervals.poll_s)
    ready: set[int] = set()
    while len(ready) < agents * workers:
        news = follower.read()
        ready |= {message["rank"] for message in news if message["type"] == "ready"}
        if not news:
            follower.wait()
    took_s = time.perf_counter() - began
    for process in processes:
        process.join()
    return took_s


def tcp_agent(port: int, task: int, workers: int, start: Any) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    start.wait()
    store.set(f"hello/{task}", f"host{task}")
    if task == 0:
        store.set("address", "10.0.0.1:1234")
    store.get("address")
    for worker in range(workers):
        store.set(f"ready/{task * workers + worker}", "1")
    store.get("done")


def over_tcp(agents: int, workers: int) -> float:
    start, ports = FORK.Barrier(agents + 1), FORK.SimpleQueue()

    def serve() -> None:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ports.put(server.port)
        time.sleep(TIMEOUT_S)

    server = FORK.Process(target=serve, daemon=True)
    server.start()
    port = ports.get()
    processes = [
        FORK.Process(target=tcp_agent, args=(port, task, workers, start)) for task in range(agents)
    ]
    for process in processes:
        process.start()
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    start.wait()
    began = time.perf_counter()
    for rank in range(agents * workers):
        store.get(f"ready/{rank}")
    took_s = time.perf_counter() - began
    store.set("done", "1")
    for process in processes:
        process.join()
    server.kill()
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", action="append", type=Path)
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    agents, workers = options.agents, options.workers
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; {agents} agents x {workers}")
    directories = options.directory or [Path("/dev/shm"), Path(tempfile.gettempdir())]
    found: dict[str, list[float]] = {"TCPStore": []}
    found |= {f"files, {directory}": [] for directory in directories}
    for _ in range(options.rounds):
        found["TCPStore"].append(over_tcp(agents, workers))
        for directory in directories:
            with tempfile.TemporaryDirectory(dir=directory) as folder:
                found[f"files, {directory}"].append(over_files(Path(folder), agents, workers))
    anchor_s = statistics.median(found["TCPStore"])
    for way, took in found.items():
        middle_s = statistics.median(took)
        spread = f"({min(took):.2f} to {max(took):.2f})"
        print(f"{way:18} {middle_s:7.2f} s {spread:16} {middle_s / anchor_s:5.2f} x TCPStore")


if __name__ == "__main__":
    main()
