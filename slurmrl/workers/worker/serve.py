"""The worker's main loop: wait for ``start``, join the process group, execute messages."""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from slurmrl import log
from slurmrl.channel.pipe import Connection
from slurmrl.errors import (
    EnvironmentFailure,
    UnreadableInputError,
    UnusableGpuError,
    UsageError,
)
from slurmrl.fsio import objects
from slurmrl.monitor.reports import Cause, Failure
from slurmrl.parallel import device
from slurmrl.parallel.activity import Activity
from slurmrl.parallel.gpu_faults import GpuFault, find_fault
from slurmrl.paths import RunPaths
from slurmrl.workers import messages
from slurmrl.workers.failure import concerning
from slurmrl.workers.messages import Message
from slurmrl.workers.worker.executor import Executor
from slurmrl.workers.worker.setup import build
from slurmrl.worlds import RankId

logger = log.get(__name__)

LINGER_S = 30.0
"""How long a failed rank waits for its agent to kill it."""
TEXT_CHARACTERS = 4_000
TRACEBACK_CHARACTERS = 50_000
"""Limits of a reported exception: it goes through pipe, name store and history."""
ECHOES = (ConnectionError, dist.DistError)
ECHO_TEXTS = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|gloo/transport|socket timeout"
    r"|remote process exited|timed out waiting|nccl (communicator|error)|timeout\(ms\)",
    re.IGNORECASE,
)
"""Messages of torch.distributed, gloo and NCCL when another rank is gone or does not take part."""


def serve(run: Path, who: RankId, pipe: Connection, activity: Activity) -> int:
    """Execute messages until ``exit`` or until the agent is gone. Exits without the interpreter's
    clean-up: that would wait for the process groups of ranks that may be gone, and takes seconds in
    a process that was forked from a large one."""
    doing: Message = {"type": messages.START}
    code = 1
    try:
        start = pipe.receive(timeout_s=None)
        if start is None:
            return 1
        executor = build(RunPaths(run), who.rank, start, pipe.take_fd(), activity, pipe.send)
        activity.end()
        pipe.send({"type": messages.READY, "rank": who.rank, **executor.describe_data()})
        while (message := pipe.receive(timeout_s=None)) is not None:
            doing = message
            if message["type"] == messages.EXIT:
                executor.close()
                code = 0
                break
            activity.begin(str(message.get("name") or message["type"]), message.get("step"))
            answer = _execute(executor, message, pipe)
            activity.end()
            pipe.send({"type": messages.DONE, "rank": who.rank, "seq": message["seq"], **answer})
        else:
            logger.warning("the agent is gone")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the process boundary: report it
        if isinstance(error, UsageError):
            logger.error("%s", error)
        else:
            traceback.print_exc()
        failure = _describe(error, who, doing)
        pipe.send({"type": messages.ERROR, **objects.to_json(failure)})
        log.flush()
        _linger(pipe)
    log.flush()
    os._exit(code)


def _execute(executor: Executor, message: Message, pipe: Connection) -> Message:
    kind = message["type"]
    if kind == messages.LOAD:
        return executor.load(message)
    if kind == messages.CALL:
        return executor.call(message)
    if kind == messages.SAVE:
        return executor.save(message, pipe.send)
    raise ValueError(f"unknown message type {kind!r}")


def _linger(pipe: Connection) -> None:
    """Stay until the agent kills this process, so that the report is sent completely and other
    ranks do not fail in their collectives before it is known which rank failed first."""
    deadline = time.monotonic() + LINGER_S
    while not pipe.closed and (left_s := deadline - time.monotonic()) > 0:
        pipe.receive(left_s)


def _describe(error: BaseException, who: RankId, doing: Message) -> Failure:
    """Return the failure, without the host. A user error is final: its message needs no traceback,
    and another start would raise it again. What one host lacks at the start, another one may have,
    and an input that cannot be read now may be readable later."""
    unreadable = isinstance(error, UnreadableInputError)
    lacking = isinstance(error, EnvironmentFailure) and doing["type"] == messages.START
    user_error = isinstance(error, UsageError)
    text = str(error) if user_error else f"{type(error).__name__}: {error}"
    exception = text[:TEXT_CHARACTERS]
    failure = concerning(error, recognise(error))
    if (lacking or unreadable) and failure.cause != Cause.GPU_FAULT:
        failure = replace(failure, cause=Cause.ENVIRONMENT)
    gpu = f"{failure.gpu} failed: " if failure.gpu else ""
    return replace(
        failure,
        reason=f"{who}: {gpu}{exception}",
        world=who.world,
        rank=who.rank,
        step=doing.get("step"),
        call=str(doing.get("name", doing["type"])),
        exception=exception,
        traceback="" if user_error else traceback.format_exc()[-TRACEBACK_CHARACTERS:],
        final=user_error and not unreadable,
    )


def recognise(error: BaseException) -> Failure:
    """Classify an exception: its cause, the GPU that failed, and whether it is an echo. A GPU that
    failed explains the others too, also where the exception is a consequence of that (see
    `device.pending_error`)."""
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
