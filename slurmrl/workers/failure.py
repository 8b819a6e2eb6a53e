"""What is known of why an incarnation failed: a JSON object, of which the first one that is
published counts.

It has ``cause`` (see `Cause`) and ``reason``, a sentence; where they are known also ``host``,
``rank``, ``call``, ``step``, ``exception``, ``traceback``, ``damaged``, a checkpoint's folder,
``agent``, one that hangs, ``echo``, true for what looks like the end of another rank, and
``final``, true for a user's mistake, after which no other incarnation is tried.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from slurmrl import keys, log
from slurmrl.errors import (
    DamagedCheckpointError,
    EnvironmentFailure,
    NameExistsError,
    RunFailedError,
    SlurmrlError,
    UsageError,
    WaitTimeoutError,
)
from slurmrl.monitor import published
from slurmrl.name_resolve.base import NameStore
from slurmrl.workers.retry import retry

logger = log.get(__name__)

Failure = dict[str, Any]
PUBLISH_TIMEOUT_S = 60.0
"""How long a directory may not answer before a failure goes unreported."""


class Cause(StrEnum):
    EXCEPTION = "exception"
    """Code raised something; in ranks mostly, so ``rank``, ``call`` and ``step`` are known."""
    DIED = "died"
    """A worker ended when it should not have."""
    OOM = "oom"
    """A process was ended, or an allocation refused, for want of memory."""
    HUNG = "hung"
    """A process gave no sign of life and was killed."""
    DEADLINE = "deadline"
    """Ranks were there but did not finish in time."""
    LOST_HOST = "lost_host"
    """An agent's lease was not beaten any more."""
    MASTER = "master"
    """The master ended when it should not have."""
    ENVIRONMENT = "environment"
    """The machine, the cluster or the shared directory could not do what was needed."""


def describe(error: Exception, who: str) -> Failure:
    """The failure that an exception means: the one it carries, or one made of its type."""
    if isinstance(error, RunFailedError) and error.failure:
        return dict(error.failure)
    if isinstance(error, WaitTimeoutError):
        return {"cause": Cause.DEADLINE, "reason": f"{who}: {error}"}
    if isinstance(error, EnvironmentFailure):
        return {"cause": Cause.ENVIRONMENT, "reason": f"{who}: {error}"}
    if isinstance(error, UsageError):
        return {"cause": Cause.EXCEPTION, "reason": f"{who}: {error}", "final": True}
    known: Failure = {}
    if isinstance(error, DamagedCheckpointError):
        known["damaged"] = error.directory
    text = str(error) if isinstance(error, SlurmrlError) else f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    return {"cause": Cause.EXCEPTION, "reason": f"{who}: {text}", "traceback": trace, **known}


def publish(
    names: NameStore,
    incarnation: int,
    failure: Mapping[str, Any],
) -> bool:
    """Say why an incarnation failed; False if somebody was first or nobody could be told."""
    value = json.dumps(failure)
    try:
        retry(
            "report the failure",
            lambda: names.add(keys.failure(incarnation), value, delete_on_exit=False),
            timeout_s=PUBLISH_TIMEOUT_S,
        )
    except NameExistsError:
        logger.info("another failure was reported first")
        return False
    except EnvironmentFailure as error:
        logger.error("nobody could be told of the failure: %s", error)
        return False
    return True


def first(names: NameStore, incarnation: int) -> Failure | None:
    """The failure that was published. Raises EnvironmentFailure."""
    return dict(published.failure(names, incarnation)) or None
