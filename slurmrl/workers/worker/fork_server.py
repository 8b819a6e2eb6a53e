"""The fork server of a host, which forks workers from a process that has done all imports.

The agent starts one fork server. In each incarnation, the agent sends one ``fork`` per rank, with
the worker's end of a new pipe, the file for its stacks and the rank's devices. The fork server
reports the end of each worker as ``ended``. The fork server uses no GPU and starts no thread, so a
forked worker computes the same as a process that was started in the usual way.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import time
from pathlib import Path
from typing import NamedTuple

from slurmrl import log
from slurmrl.config.allocation.allocation import BACKENDS
from slurmrl.engines import ENGINES
from slurmrl.plan.model import Plan
from slurmrl.registry import resolve
from slurmrl.rollouts.generation.process import remove_unused
from slurmrl.rollouts.generation.warden import Leftovers
from slurmrl.run.channel.pipe import Connection
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import TRAINERS
from slurmrl.workers import child_process
from slurmrl.workers.messages import (
    FROM_FORK_SERVER,
    TO_FORK_SERVER,
    Fork,
    Kill,
    WorkerEnded,
    WriteStacks,
)

logger = log.get(__name__)

OWN_PACKAGE = "slurmrl."
LEFTOVERS_S = 1.5
"""Seconds that killed leftover processes of a worker may take to end. This is less than
`loss_detection.ECHO_GRACE_S`, so the agent learns of the worker's end in time."""
POLL_S = 0.01
"""Interval of polls for the end of leftover processes."""


def preload(run: Path, group: str) -> None:
    """Import the modules that a group's workers need. Later garbage collections ignore them.

    Do not import the user's modules, because their import may have side effects.
    """
    from transformers import AutoTokenizer  # noqa: F401

    import slurmrl.workers.worker.orders  # noqa: F401

    plan = Plan.read(RunPaths(run).plan)
    for model in plan.models_of(group).values():
        # Decoders of rollout tasks need no engine.
        if group == TRAINERS or BACKENDS[model.engine].serves:
            ENGINES.load(model.engine)
    used = [plan.group(group).worker]
    if group == TRAINERS:
        import torch._dynamo  # noqa: F401 - an optimizer's first step would import it for a second

        used += [call.interface for call in plan.all_calls]
    for reference in used:
        if reference.startswith(OWN_PACKAGE):
            resolve(reference)
    # Exclude existing objects from garbage collection. A full collection would visit a million
    # objects and write to memory pages that the workers share with this process.
    gc.freeze()
    gc.enable()


class Forked(NamedTuple):
    """The rank and the pipe of a new worker."""

    rank: int
    pipe: Connection


def serve(agent: Connection, stacks_fd: int) -> Forked | None:
    """Fork workers on request until the agent has ended; then return None.

    In a forked worker, return its rank and pipe at once. Running workers die with the fork server.

    ``stacks_fd`` is the file for this process's stacks (see `write_stacks_on_signal`). In a worker,
    the descriptor refers to the rank's file.
    """
    child_process.name_process("fork server")
    child_process.adopt_orphans()
    return _ForkServer(agent, stacks_fd).serve()


class _Worker(NamedTuple):
    pid: int
    pidfd: int


class _ForkServer:
    """The loop of a fork server.

    Each worker adopts the orphans of its descendants. Therefore, any child of this process that is
    not a worker is a leftover of an ended worker. Such a child may occupy a GPU, so this process
    kills it.
    """

    def __init__(self, agent: Connection, stacks_fd: int) -> None:
        self._agent = agent
        self._stacks_fd = stacks_fd
        self._workers: dict[int, _Worker] = {}
        """Mapping from rank to running worker."""
        self._ended: list[tuple[WorkerEnded, float]] = []
        """Ends of workers that are reported when the leftovers have ended, each with a deadline."""
        self._leftovers = Leftovers()

    def serve(self) -> Forked | None:
        while not self._agent.closed:
            self._wait()
            self._reap()
            self._report_ends()
            for values in self._agent.receive_available():
                request = TO_FORK_SERVER.from_json(values)
                if isinstance(request, Fork):
                    if (forked := self._fork(request)) is not None:
                        return forked
                elif worker := self._workers.get(request.rank):
                    self._signal(worker, request)
        return None

    def _wait(self) -> None:
        """Wait until the agent sends a message, a worker has ended or a check is due."""
        poller = select.poll()
        poller.register(self._agent, select.POLLIN)
        for worker in self._workers.values():
            poller.register(worker.pidfd, select.POLLIN)
        poller.poll(1000 * POLL_S if self._ended else None)

    def _reap(self) -> None:
        """Collect the exit codes of ended workers; a code is negative for a signal."""
        for rank, worker in list(self._workers.items()):
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid:
                os.close(self._workers.pop(rank).pidfd)
                ended = WorkerEnded(rank=rank, code=os.waitstatus_to_exitcode(status))
                self._ended.append((ended, time.monotonic() + LEFTOVERS_S))
                self._leftovers = Leftovers()

    def _report_ends(self) -> None:
        """Kill the leftovers of ended workers, then report their ends."""
        if not self._ended:
            return
        left = self._leftovers.kill(spared=[worker.pid for worker in self._workers.values()])
        now = time.monotonic()
        due = [(ended, latest) for ended, latest in self._ended if not left or latest <= now]
        for ended, latest in due:
            self._ended.remove((ended, latest))
            self._agent.send(FROM_FORK_SERVER.to_json(ended))
        if due:
            remove_unused()  # Report first: this may take seconds.

    def _signal(self, worker: _Worker, request: Kill | WriteStacks) -> None:
        os.kill(
            worker.pid, signal.SIGKILL if isinstance(request, Kill) else child_process.STACKS_SIGNAL
        )

    def _fork(self, request: Fork) -> Forked | None:
        """Fork a worker. In the worker, return its rank and pipe; in this process, return None."""
        pipe, stacks_fd = self._agent.take_fd(), self._agent.take_fd()
        assert pipe is not None
        assert stacks_fd is not None
        assert request.rank not in self._workers, "one worker of a rank at a time"
        log.flush()
        fork_server = os.getpid()
        pid = os.fork()
        if pid == 0:
            child_process.die_with(fork_server)
            child_process.name_process(f"rank {request.rank}")
            child_process.adopt_orphans()
            os.dup2(stacks_fd, self._stacks_fd, inheritable=False)
            os.close(stacks_fd)
            for worker in self._workers.values():
                os.close(worker.pidfd)
            self._agent.close()
            os.environ.update(request.environment)
            return Forked(request.rank, Connection.from_fd(pipe))
        os.close(pipe)
        os.close(stacks_fd)
        self._workers[request.rank] = _Worker(pid, os.pidfd_open(pid))
        return None
