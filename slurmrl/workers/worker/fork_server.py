"""The fork server of a rank: a process with all imports done, from which its workers are forked.

The agent starts one fork server per rank, with the rank's devices in its environment. For each
incarnation it sends ``fork`` with the worker's end of a new pipe. The fork server reports the end
of the worker as ``ended``. It uses no GPU and starts no thread, so a forked worker computes the
same as a freshly started one.
"""

from __future__ import annotations

import gc
import os
import select
import signal
from pathlib import Path

from slurmrl import log
from slurmrl.allocation.allocation import BACKENDS
from slurmrl.channel.pipe import Connection
from slurmrl.engines import ENGINES
from slurmrl.engines.rollout.process import remove_unused
from slurmrl.engines.rollout.warden import end_children
from slurmrl.paths import RunPaths
from slurmrl.plan.model import Plan
from slurmrl.registry import resolve
from slurmrl.workers import process, stacks
from slurmrl.workers.messages import (
    FROM_FORK_SERVER,
    TO_FORK_SERVER,
    Fork,
    Kill,
    WorkerEnded,
    WriteStacks,
)
from slurmrl.worlds import TRAINERS

logger = log.get(__name__)

OWN_PACKAGE = "slurmrl."
LEFTOVERS_S = 2.0
"""How long processes that a worker left behind may take to end after they were killed."""


def preload(run: Path, group: str) -> None:
    """Import what the workers of a group need, except the user's modules: importing those may have
    any side effect. Nothing of it is ever garbage."""
    from transformers import AutoTokenizer  # noqa: F401

    import slurmrl.workers.worker.serve  # noqa: F401

    plan = Plan.read(RunPaths(run).plan)
    for model in plan.models_of(group).values():
        if group == TRAINERS or BACKENDS[model.engine].serves:  # tasks have a decoder without it
            ENGINES.load(model.engine)
    used = [plan.group(group).worker]
    if group == TRAINERS:
        import torch._dynamo  # noqa: F401 - the first step of an optimizer does, for a second

        used += [call.interface for call in plan.all_calls]
    for reference in used:
        if reference.startswith(OWN_PACKAGE):
            resolve(reference)
    # Each full collection would visit its million objects, and write to pages that the workers
    # share with this process.
    gc.freeze()
    gc.enable()


def serve(agent: Connection, rank: int) -> Connection | None:
    """Fork workers on request. Return in each worker with its pipe, and in the fork server with
    None once the agent is gone. A running worker dies with the fork server."""
    process.name_process(f"fork server {rank}")
    process.adopt_orphans()
    worker: int | None = None
    while not agent.closed:
        _wait(agent, worker)
        if worker is not None and (code := _ended(worker)) is not None:
            # they may hold the GPU, and no other process knows them
            end_children(LEFTOVERS_S)
            remove_unused()
            worker = None
            agent.send(FROM_FORK_SERVER.to_json(WorkerEnded(code)))
        for values in agent.receive_available():
            request = TO_FORK_SERVER.from_json(values)
            if isinstance(request, Kill) and worker is not None:
                os.kill(worker, signal.SIGKILL)
            elif isinstance(request, WriteStacks) and worker is not None:
                os.kill(worker, stacks.SIGNAL)
            elif isinstance(request, Fork):
                descriptor = agent.take_fd()
                assert descriptor is not None
                assert worker is None, "one worker at a time"
                worker = _fork(rank)
                if worker == 0:
                    agent.close()
                    return Connection.from_fd(descriptor)
                os.close(descriptor)
    return None


def _fork(rank: int) -> int:
    """Fork a worker. Return its pid, or 0 in the worker."""
    log.flush()
    fork_server = os.getpid()
    pid = os.fork()
    if pid == 0:
        process.die_with(fork_server)
        process.name_process(f"rank {rank}")
    return pid


def _wait(agent: Connection, worker: int | None) -> None:
    """Wait until the agent sends a message or the worker has ended."""
    poller = select.poll()
    poller.register(agent, select.POLLIN)
    pidfd = os.pidfd_open(worker) if worker is not None else None
    try:
        if pidfd is not None:
            poller.register(pidfd, select.POLLIN)
        poller.poll()
    finally:
        if pidfd is not None:
            os.close(pidfd)


def _ended(worker: int) -> int | None:
    """Return the exit code, negative for a signal, or None while it runs."""
    pid, status = os.waitpid(worker, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None
