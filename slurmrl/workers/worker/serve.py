"""A worker's life: wait for ``start``, join the process group, load models, execute messages."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

from slurmrl import log
from slurmrl.channel.pipe import Connection
from slurmrl.paths import RunPaths
from slurmrl.workers import messages
from slurmrl.workers.messages import Message
from slurmrl.workers.worker.executor import Executor
from slurmrl.workers.worker.setup import build

logger = log.get(__name__)


def serve(run: Path, rank: int, pipe: Connection) -> int:
    """Execute messages until ``exit`` or until the agent is gone. Leaves without the usual
    clean-up then, and when something raised: the other ranks may be gone, and tearing down
    process groups would wait for them."""
    doing: Message = {"type": messages.START}
    try:
        start = pipe.receive(timeout_s=None)
        if start is None:
            return 1
        executor = build(RunPaths(run), rank, start, pipe.take_fd())
        pipe.send({"type": messages.READY, "rank": rank, **executor.describe_data()})
        while (message := pipe.receive(timeout_s=None)) is not None:
            doing = message
            if message["type"] == messages.EXIT:
                executor.close()
                return 0
            answer = _execute(executor, message)
            pipe.send({"type": messages.DONE, "rank": rank, "seq": message["seq"], **answer})
        logger.warning("the agent is gone")
    except Exception as error:  # noqa: BLE001 - the process boundary: report it and end
        traceback.print_exc()
        pipe.send(_describe(error, rank, doing))
    log.flush()
    os._exit(1)


def _execute(executor: Executor, message: Message) -> Message:
    kind = message["type"]
    if kind == messages.LOAD:
        return executor.load(message)
    if kind == messages.CALL:
        return executor.call(message)
    if kind == messages.SAVE:
        return executor.save(message)
    raise ValueError(f"unknown message type {kind!r}")


def _describe(error: Exception, rank: int, doing: Message) -> dict[str, Any]:
    return {
        "type": messages.ERROR,
        "rank": rank,
        "step": doing.get("step"),
        "call": doing.get("name", doing["type"]),
        "exception": f"{type(error).__name__}: {error}",
        "traceback": traceback.format_exc(),
    }
