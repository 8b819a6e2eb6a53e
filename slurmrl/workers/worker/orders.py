"""The worker's main loop: wait for ``start``, join the process group, execute messages."""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from slurmrl import log
from slurmrl.errors import EnvironmentFailure, UnreadableInputError, UnusableGpuError, UsageError
from slurmrl.run.channel.pipe import Connection
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import TRAINERS, Cause, Failure, RankId
from slurmrl.tensors.parallel import device
from slurmrl.tensors.parallel.gpu import GpuFault, find_fault
from slurmrl.tensors.parallel.groups import Activity
from slurmrl.workers.failure import concerning, traceback_of
from slurmrl.workers.messages import (
    FROM_WORKER,
    TO_ROLLOUT_WORKER,
    TO_WORKER,
    Answer,
    Exit,
    LoadBatch,
    Order,
    RunCall,
    Save,
    Start,
    StartRollout,
    WriteVersion,
)
from slurmrl.workers.worker.setup import build, build_rollout

logger = log.get(__name__)

LINGER_S = 30.0
"""Seconds that a failed rank waits for its agent to kill it."""
TEXT_CHARACTERS = 4_000
TRACEBACK_CHARACTERS = 50_000
"""Maximum length of a reported traceback, which passes through pipe, name store and history."""
ECHOES = (ConnectionError, dist.DistError)
ECHO_TEXTS = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|gloo/transport|socket timeout"
    r"|remote process exited|timed out waiting|nccl (communicator|error)|timeout\(ms\)",
    re.IGNORECASE,
)
"""Pattern of the messages with which torch.distributed, gloo and NCCL report a missing rank."""


class _Place(NamedTuple):
    """The current activity of a worker."""

    call: str
    """Name of a call of the dataflow graph, or the type of a message."""
    step: int | None = None


START = _Place("start")
SERVING = _Place("rollout")


def serve(run: Path, who: RankId, pipe: Connection, activity: Activity) -> int:
    """Execute messages until the last message or until the agent has ended.

    Then exit without the interpreter's clean-up. The clean-up would wait for process groups of
    ranks that may have ended, and takes seconds in a fork of a large process.
    """
    rank = _Rank(run, who, pipe, activity)
    code = 1
    try:
        code = rank.train() if who.world == TRAINERS else rank.roll_out()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the process boundary: report it
        if isinstance(error, UsageError):
            logger.error("%s", error)
        else:
            traceback.print_exc()
        rank.send(_failure_of(error, who, rank.place))
        log.flush()
        _linger(pipe)
    log.flush()
    os._exit(code)


class _Rank:
    def __init__(self, run: Path, who: RankId, pipe: Connection, activity: Activity) -> None:
        self.place = START
        self._paths, self._who, self._pipe, self._activity = RunPaths(run), who, pipe, activity

    def send(self, message: Answer | Failure) -> None:
        self._pipe.send(FROM_WORKER.to_json(message))

    def train(self) -> int:
        """Execute orders until ``exit``; return the exit code."""
        pipe, activity = self._pipe, self._activity
        if (first := pipe.receive(timeout_s=None)) is None:
            return 1
        start = TO_WORKER.from_json(first)
        assert isinstance(start, Start), start
        worker = build(self._paths, self._who, start, activity, self.send)
        activity.end()
        self.send(worker.ready())
        while (values := pipe.receive(timeout_s=None)) is not None:
            order = TO_WORKER.from_json(values)
            assert isinstance(order, Order), order
            self.place = _place(order)
            if isinstance(order, Exit):
                worker.close()
                return 0
            activity.begin(*self.place)
            done = worker.execute(order, self.send)
            activity.end()
            self.send(done)
        logger.warning("this worker exits, because its agent has ended")
        return 1

    def roll_out(self) -> int:
        """Serve the requests of a rollout task until it retires; return the exit code."""
        if (first := self._pipe.receive(timeout_s=None)) is None:
            return 1
        start = TO_ROLLOUT_WORKER.from_json(first)
        assert isinstance(start, StartRollout), start
        worker = build_rollout(self._paths, self._who, start, self._activity)
        self._activity.end()
        self.send(worker.ready())
        self.place = SERVING
        worker.serve(self._pipe)
        return 0


def _place(order: Order) -> _Place:
    match order:
        case RunCall():
            return _Place(order.name, order.step)
        case LoadBatch() | Save() | WriteVersion():
            return _Place(TO_WORKER.type_of(order), order.step)
    return _Place(TO_WORKER.type_of(order))


def _linger(pipe: Connection) -> None:
    """Wait until the agent has received the report and kills this process.

    If this process exited at once, other ranks could fail in collectives and report earlier.
    """
    deadline = time.monotonic() + LINGER_S
    while not pipe.closed and (left_s := deadline - time.monotonic()) > 0:
        pipe.receive(left_s)


def _failure_of(error: BaseException, who: RankId, place: _Place) -> Failure:
    """Return the failure that an error describes, without the host.

    A user error is final, because every start would repeat it. Its message needs no traceback.
    Other errors may not occur in another start: another host may have the missing resources, an
    input may become readable, and ranks may reach each other.
    """
    unreadable = isinstance(error, UnreadableInputError)
    user_error = isinstance(error, UsageError)
    text = str(error) if user_error else f"{type(error).__name__}: {error}"
    exception = text[:TEXT_CHARACTERS]
    failure = concerning(error, recognize(error))
    lacking = place == START and (isinstance(error, EnvironmentFailure) or failure.echo)
    if (lacking or unreadable) and failure.cause != Cause.GPU_FAULT:
        failure = replace(failure, cause=Cause.ENVIRONMENT)
    gpu = f"{failure.gpu} failed: " if failure.gpu else ""
    return replace(
        failure,
        reason=f"{who}: {gpu}{exception}",
        world=who.world,
        rank=who.rank,
        step=place.step,
        call=place.call,
        exception=exception,
        traceback="" if user_error else traceback_of(error)[-TRACEBACK_CHARACTERS:],
        final=user_error and not unreadable,
    )


def recognize(error: BaseException) -> Failure:
    """Return the cause of an exception, the failed GPU, and whether it is an echo.

    An echo is an exception that looks like a consequence of another rank's end. A failed GPU also
    explains other exceptions of the same rank (see `device.pending_error`).
    """
    chain = list(_chain(error))
    fault = _gpu_fault(chain)
    if fault or isinstance(error, UnusableGpuError):
        certain = fault is not None and fault.certain
        return Failure(cause=Cause.GPU_FAULT, gpu=device.describe_gpu(), certain=certain)
    echo = any(isinstance(error, ECHOES) or _says_echo(error) for error in chain)
    oom = any(isinstance(error, MemoryError | torch.OutOfMemoryError) for error in chain)
    return Failure(cause=Cause.OOM if oom else Cause.EXCEPTION, echo=echo)


def _gpu_fault(chain: list[BaseException]) -> GpuFault | None:
    pending = device.pending_error()
    errors = chain if pending is None else [*chain, pending]
    return next((fault for error in errors if (fault := find_fault(error))), None)


def _says_echo(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and ECHO_TEXTS.search(str(error)) is not None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes."""
    while error is not None:
        yield error
        error = error.__cause__
