"""The processes of one host: its workers, and the master on the first host of the group."""

from __future__ import annotations

import os
import selectors
import shlex
from dataclasses import dataclass
from typing import IO

from slurmrl.channel.follower import Follower
from slurmrl.channel.pipe import Connection
from slurmrl.errors import WorkerDiedError
from slurmrl.paths import RunPaths
from slurmrl.plan.model import GroupPlan
from slurmrl.workers import process
from slurmrl.workers.agent.identity import Identity
from slurmrl.workers.messages import Message


@dataclass(frozen=True)
class Worker:
    """A rank's process and the pipe to it."""

    rank: int
    child: process.Child
    pipe: Connection


class Children:
    """Starts, hears and ends the processes of this host."""

    def __init__(self, paths: RunPaths, group: GroupPlan, identity: Identity) -> None:
        self.paths = paths
        self.group = group
        self.identity = identity
        self.workers: list[Worker] = []
        self.master: process.Child | None = None
        self._selector = selectors.DefaultSelector()

    @property
    def first_rank(self) -> int:
        return self.identity.task * self.group.workers_per_host

    def start_workers(self, devices: list[str], container: str | None, output: IO[bytes]) -> None:
        """Start all workers at once, each with its devices visible before Python starts: they
        import torch while the incarnation forms."""
        for rank, visible in enumerate(devices, start=self.first_rank):
            environment = {
                **os.environ,
                "CUDA_VISIBLE_DEVICES": visible,
                "OMP_NUM_THREADS": str(self.group.threads_per_worker),
            }
            child, pipe = process.spawn_with_pipe(
                f"rank {rank} on {self.identity.host}",
                "slurmrl.workers.worker",
                ["--run", str(self.paths.run), "--rank", str(rank)],
                output=output,
                environment=environment,
                prefix=shlex.split(container or ""),
            )
            self.workers.append(Worker(rank, child, pipe))
            self._selector.register(pipe.fileno(), selectors.EVENT_READ, self.workers[-1])
            self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def start_master(self, submission: int, output: IO[bytes]) -> None:
        arguments = ["--run", str(self.paths.run), "--submission", str(submission)]
        arguments += ["--job", self.identity.job]
        self.master = process.spawn(
            "the master",
            "slurmrl.workers.master",
            arguments,
            output=output,
            environment={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        self._selector.register(self.master.pidfd, selectors.EVENT_READ, self.master)

    def broadcast(self, message: Message) -> None:
        for worker in self.workers:
            worker.pipe.send(message)

    def wake_on(self, follower: Follower) -> None:
        """End a `turn` also when the logs of a follower have changed."""
        if follower.fileno() >= 0:
            self._selector.register(follower.fileno(), selectors.EVENT_READ, follower)

    def turn(self, timeout_s: float) -> tuple[list[Message], list[process.Child]]:
        """Wait at most ``timeout_s``; what workers said, and which children ended."""
        for worker in self.workers:
            worker.pipe.flush()  # what a busy worker's buffer did not take so far
        heard: list[Message] = []
        ended: list[process.Child] = []
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, Follower):
                key.data.drain()  # whoever waits here reads it next
            elif isinstance(key.data, Worker):
                heard += key.data.pipe.receive_available()
                if key.data.pipe.closed:
                    self._selector.unregister(key.fd)
            else:
                self._selector.unregister(key.fd)
                key.data.process.wait()
                ended.append(key.data)
        return heard, ended

    def all_ended(self) -> bool:
        return all(child.ended() is not None for child in self._all())

    def _all(self) -> list[process.Child]:
        children = [worker.child for worker in self.workers]
        return [*children, self.master] if self.master is not None else children

    def close(self) -> None:
        """End whatever still runs."""
        for child in self._all():
            child.close()
        for worker in self.workers:
            worker.pipe.close()
        self._selector.close()


def check(ended: list[process.Child]) -> None:
    """Raise WorkerDiedError for the first child that did not exit with 0."""
    for child in ended:
        if child.process.returncode != 0:
            raise WorkerDiedError(child.ending())
