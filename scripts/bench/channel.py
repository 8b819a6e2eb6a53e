#!/usr/bin/env python3
"""Measure the round trip master -> agent -> worker -> agent -> master over logs in a directory.

scripts/bench/channel.py [--directory DIR ...] [--messages 500]

The agent reads the master's log and passes messages to a worker over a pipe. It writes the answers
into its own log, which the master reads. If pyzmq is installed, the script also measures the same
three processes with pyzmq (TCP on loopback between master and agent, the same pipe to the worker).
The script also prints the CPU time of a waiting agent.
"""

from __future__ import annotations

import argparse
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from forks import fork

from slurmrl.fsio.calls import is_local
from slurmrl.run.channel import follower
from slurmrl.run.channel.follower import Follower
from slurmrl.run.channel.message_log import LogReader, LogWriter
from slurmrl.run.channel.pipe import Connection

POLL_S = 0.05
IDLE_S = 5.0
TIMEOUT_MS = 10_000
Exchange = Callable[[dict[str, Any]], dict[str, Any]]


def worker(pipe: Connection) -> None:
    while (message := pipe.receive(timeout_s=None)) is not None:
        pipe.send({"seq": message["seq"], "rank": 0})


def log_agent(folder: Path) -> None:
    ours, theirs = Connection.pair()
    child = fork(lambda: (ours.close(), worker(theirs))[1])
    theirs.close()
    replies = LogWriter(folder / "agent")
    follower = Follower([LogReader(folder / "master")], folder, longest_poll_s=POLL_S)
    selector = selectors.DefaultSelector()
    selector.register(ours.fileno(), selectors.EVENT_READ)
    if follower.fileno() >= 0:
        selector.register(follower.fileno(), selectors.EVENT_READ)
    while True:
        for message in follower.read():
            if message["seq"] < 0:
                used = time.process_time()
                replies.append({"seq": -1, "cpu_s": used})
                ours.close()
                os.waitpid(child, 0)
                return
            ours.send(message)
        for key, _ in selector.select(follower.pause_s()):
            if key.fd == ours.fileno():
                answers = ours.receive_available()
                if answers:
                    replies.append(*answers)
            else:
                follower.drain()


def over_logs(folder: Path, messages: int) -> dict[str, float]:
    master = LogWriter(folder / "master")
    agent = fork(lambda: log_agent(folder))
    follower = Follower([LogReader(folder / "agent")], folder, longest_poll_s=POLL_S)

    def exchange(message: dict[str, Any]) -> dict[str, Any]:
        master.append(message)
        while not (answers := follower.read()):
            follower.wait()
        return answers[0]

    times = measure(exchange, messages)
    before = cpu_s(agent)
    time.sleep(IDLE_S)
    idle = (cpu_s(agent) - before) / IDLE_S
    exchange({"seq": -1})
    os.waitpid(agent, 0)
    return {**summary(times), "idle_agent_core_percent": 100 * idle}


def zmq_agent(down: int, up: int) -> None:
    import zmq

    ours, theirs = Connection.pair()
    child = fork(lambda: (ours.close(), worker(theirs))[1])
    theirs.close()
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.connect(f"tcp://127.0.0.1:{down}")
    push.connect(f"tcp://127.0.0.1:{up}")
    while (message := pull.recv_json())["seq"] >= 0:
        ours.send(message)
        push.send_json(ours.receive(timeout_s=None))
    push.send_json({"seq": -1})
    ours.close()
    os.waitpid(child, 0)
    context.destroy(linger=1000)


def over_zmq(messages: int) -> dict[str, float]:
    import zmq

    context = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (push, pull)]
    command = [sys.executable, __file__, "--zmq-agent", *map(str, ports)]
    with subprocess.Popen(command) as agent:

        def exchange(message: dict[str, Any]) -> dict[str, Any]:
            push.send_json(message)
            if not pull.poll(TIMEOUT_MS):
                agent.kill()
                raise SystemExit(f"no answer over pyzmq within {TIMEOUT_MS} ms")
            answer: dict[str, Any] = pull.recv_json()
            return answer

        times = measure(exchange, messages)
        exchange({"seq": -1})
    context.destroy(linger=0)
    return summary(times)


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(exchange: Exchange, messages: int) -> list[float]:
    for seq in range(20):
        exchange({"seq": seq, "type": "call", "step": 0})
    times = []
    for seq in range(messages):
        began = time.perf_counter()
        answer = exchange({"seq": seq, "type": "call", "step": seq, "name": "train"})
        times.append(time.perf_counter() - began)
        assert answer["seq"] == seq
        time.sleep(0.001)  # all processes wait before the next message
    return times


def summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "least_us": ordered[0] * 1e6,
        "median_us": statistics.median(times) * 1e6,
        "p90_us": ordered[int(0.9 * len(times))] * 1e6,
        "p99_us": ordered[int(0.99 * len(times))] * 1e6,
        "most_us": ordered[-1] * 1e6,
    }


def show(name: str, figures: dict[str, float]) -> None:
    print(f"{name:34}" + "  ".join(f"{key} {value:8.1f}" for key, value in figures.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", action="append", type=Path)
    parser.add_argument("--messages", type=int, default=500)
    parser.add_argument("--zmq-agent", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.zmq_agent:
        return zmq_agent(*options.zmq_agent)
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {options.messages} messages")
    for directory in options.directory or [Path("/dev/shm"), Path(tempfile.gettempdir())]:
        for told in (True, False):
            follower.is_local = is_local if told else lambda path: False
            with tempfile.TemporaryDirectory(dir=directory) as folder:
                name = f"log, {directory}, {'inotify' if told else 'polling'}"
                show(name, over_logs(Path(folder), options.messages))
    try:
        show("pyzmq, TCP loopback", over_zmq(options.messages))
    except ImportError:
        print("pyzmq is not installed")


if __name__ == "__main__":
    main()
