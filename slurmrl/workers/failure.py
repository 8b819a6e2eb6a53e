"""Failures of incarnations: JSON objects, of which the first one published counts.

A failure has ``cause`` (see `Cause`) and ``reason``, a sentence. Where known it also has:

- ``host``, ``rank``, ``call``, ``step``: where it happened;
- ``exception``, ``traceback``;
- ``gpu``: the GPU that failed; ``certain``: whether nothing but its hardware can be the reason;
- ``damaged``: directory of a damaged checkpoint;
- ``absent``: path of an input that does not exist, although its directory can be read;
- ``agent``: the agent that hangs;
- ``echo``: true if it looks like a consequence of another rank's end;
- ``final``: true for a user error, after which no other incarnation is tried.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from slurmrl import keys, log
from slurmrl.backoff import retry
from slurmrl.errors import (
    DamagedCheckpointError,
    EnvironmentFailure,
    NameExistsError,
    RunFailedError,
    SlurmrlError,
    UnreadableInputError,
    UsageError,
    WaitTimeoutError,
)
from slurmrl.monitor import published
from slurmrl.name_resolve.base import NameStore

logger = log.get(__name__)

Failure = dict[str, Any]
PUBLISH_TIMEOUT_S = 60.0
"""Seconds without an answer from the directory after which a failure goes unreported."""


HOST_LOSSES = ("lost_host", "gpu_fault")
"""Causes of failures after which a job continues without the host."""
ENVIRONMENT = (EnvironmentFailure, UnreadableInputError)
"""Errors that another start, perhaps on another host, may not meet."""


class Cause(StrEnum):
    EXCEPTION = "exception"
    """Code raised an exception; mostly in a rank, so ``rank``, ``call`` and ``step`` are known."""
    DIED = "died"
    """A worker ended unexpectedly."""
    OOM = "oom"
    """A process was killed, or an allocation failed, for lack of memory."""
    HUNG = "hung"
    """A process gave no sign of life and was killed."""
    DEADLINE = "deadline"
    """Ranks were alive but did not finish in time."""
    LOST_HOST = "lost_host"
    """An agent stopped renewing its lease."""
    GPU_FAULT = "gpu_fault"
    """A GPU failed (see `parallel.gpu_faults`); its host is given up like a lost one."""
    MASTER = "master"
    """The master ended unexpectedly."""
    ENVIRONMENT = "environment"
    """The machine, the cluster or the shared directory could not do what was needed."""


def describe(error: Exception, who: str) -> Failure:
    """Return the failure that an exception carries, or derive one from its type. ``who`` failed."""
    if isinstance(error, RunFailedError) and error.failure:
        return dict(error.failure)
    if isinstance(error, WaitTimeoutError):
        return {"cause": Cause.DEADLINE, "reason": f"{who}: {error}"}
    if isinstance(error, ENVIRONMENT):
        return {"cause": Cause.ENVIRONMENT, "reason": f"{who}: {error}", **concerned(error)}
    if isinstance(error, UsageError):
        return {"cause": Cause.EXCEPTION, "reason": f"{who}: {error}", "final": True}
    text = str(error) if isinstance(error, SlurmrlError) else f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    return {
        "cause": Cause.EXCEPTION,
        "reason": f"{who}: {text}",
        "traceback": trace,
        **concerned(error),
    }


def concerned(error: BaseException) -> Failure:
    """Return the checkpoint or the input that an error is about."""
    if isinstance(error, DamagedCheckpointError):
        return {"damaged": error.directory}
    if isinstance(error, UnreadableInputError) and error.absent:
        return {"absent": error.absent}
    return {}


def publish(
    names: NameStore,
    incarnation: int,
    failure: Mapping[str, Any],
) -> bool:
    """Publish why an incarnation failed. Return False if another failure was published first or the
    directory did not take this one."""
    value = json.dumps(failure)
    try:
        retry(
            "publish the failure",
            lambda: names.add(keys.failure(incarnation), value, delete_on_exit=False),
            timeout_s=PUBLISH_TIMEOUT_S,
        )
    except NameExistsError:
        logger.info("another failure was published first")
        return False
    except EnvironmentFailure as error:
        logger.error("cannot publish the failure: %s", error)
        return False
    return True


def publish_loss(names: NameStore, host: str, incarnation: int, job: str) -> None:
    """Publish that a host is of no further use in this start of a job. Raises EnvironmentFailure
    if the directory does not answer."""
    note = json.dumps({"incarnation": incarnation, "job": job})
    retry(
        "report a lost host",
        lambda: names.add(keys.lost(host), note, replace=True, delete_on_exit=False),
        timeout_s=PUBLISH_TIMEOUT_S,
    )


def first(names: NameStore, incarnation: int) -> Failure | None:
    """Return the failure that was published, without a cause if it is damaged. Raises
    EnvironmentFailure."""
    return dict(published.failure(names, incarnation)) or None
