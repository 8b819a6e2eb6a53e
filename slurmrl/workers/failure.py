"""Failures of incarnations (see `run.reports`) and explanations of hangs.

Only the first published failure of an incarnation counts. The explanation of a hang contains the
activity of the ranks when silence or a deadline ended the incarnation.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from slurmrl import log
from slurmrl.backoff import retry
from slurmrl.errors import (
    DamagedCheckpointError,
    EnvironmentFailure,
    NameExistsError,
    ReportedError,
    SlurmrlError,
    UnreadableInputError,
    UsageError,
    WaitTimeoutError,
)
from slurmrl.fsio import documents
from slurmrl.name_resolve.store import NameStore
from slurmrl.run import keys
from slurmrl.run.events import EventWriter
from slurmrl.run.hang import RankProgress, explain, grouped
from slurmrl.run.reports import Cause, Failure, Hang, Identity, LostHost

logger = log.get(__name__)

PUBLISH_TIMEOUT_S = 60.0
"""Seconds after which a process gives up publishing a failure if the directory does not answer."""
ENVIRONMENT = (EnvironmentFailure, UnreadableInputError)
"""Errors that another start, perhaps on another host, may avoid."""
COLLECT_S = 15.0
"""Seconds that the master waits for the stacks of all hosts."""


def failure_of(error: Exception, who: str) -> Failure:
    """Return the failure that an exception contains or describes. ``who`` is the failed process."""
    if isinstance(error, ReportedError):
        failure: Failure = error.failure
        return failure
    if isinstance(error, WaitTimeoutError):
        return Failure(cause=Cause.DEADLINE, reason=f"{who}: {error}")
    if isinstance(error, ENVIRONMENT):
        return concerning(error, Failure(cause=Cause.ENVIRONMENT, reason=f"{who}: {error}"))
    if isinstance(error, UsageError):
        return Failure(cause=Cause.EXCEPTION, reason=f"{who}: {error}", final=True)
    text = str(error) if isinstance(error, SlurmrlError) else f"{type(error).__name__}: {error}"
    reason = f"{who}: {text}"
    raised = Failure(cause=Cause.EXCEPTION, reason=reason, traceback=traceback_of(error))
    return concerning(error, raised)


def traceback_of(error: BaseException) -> str:
    """Return the traceback, without the frames of slurmrl that called the user's code.

    The log of the process contains all frames.
    """
    shown = traceback.TracebackException.from_exception(error)
    omitted = 0
    for one in _chain(shown):
        frames = enumerate(one.stack)
        first = next((number for number, frame in frames if _is_users(frame.filename)), 0)
        del one.stack[:first]
        omitted += first
    note = f"({omitted} frames of slurmrl omitted; the log has them)\n" if omitted else ""
    return note + "".join(shown.format())


def _chain(shown: traceback.TracebackException | None) -> Iterator[traceback.TracebackException]:
    """Yield an exception and the exceptions that `traceback` prints above it."""
    while shown is not None:
        yield shown
        hidden = shown.__suppress_context__ or shown.__cause__ is not None
        shown = shown.__cause__ if hidden else shown.__context__


def _is_users(file: str) -> bool:
    """Return whether a source file belongs to the user: it is below an entry of PYTHONPATH.

    The first entry contains the trial's copy of the code. Installed packages do not count, even if
    they are editable.
    """
    # Compare with the file name of a code object, because tracebacks contain that name.
    path, ours = Path(file), Path(failure_of.__code__.co_filename).parents[1]
    if {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(ours):
        return False
    own = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return any(path.is_relative_to(os.path.abspath(entry)) for entry in own)


def concerning(error: BaseException, failure: Failure) -> Failure:
    """Return the failure after adding the damaged checkpoint or missing input of an error."""
    if isinstance(error, DamagedCheckpointError):
        return replace(failure, damaged=error.directory)
    if isinstance(error, UnreadableInputError):
        return replace(failure, absent=error.absent)
    return failure


def publish(names: NameStore, incarnation: int, failure: Failure) -> bool:
    """Publish why an incarnation failed.

    Return False if another process was first, or if the directory rejects the failure.
    """
    try:
        _add(names, "publish the failure", keys.failure(incarnation), failure, replace=False)
    except NameExistsError:
        logger.info("another failure was published first")
        return False
    except EnvironmentFailure as error:
        logger.error("cannot publish the failure: %s", error)
        return False
    return True


def publish_attempt(names: NameStore, identity: Identity, failure: Failure) -> None:
    """Publish why an attempt at a rollout task failed.

    Raises EnvironmentFailure if the directory does not answer.
    """
    key = keys.attempt_failure(identity.group, identity.task, identity.attempt)
    _add(names, "publish the failure", key, failure)


def publish_loss(names: NameStore, host: str, incarnation: int, job: str) -> None:
    """Publish that a job does not use a host until the job starts again.

    Raises EnvironmentFailure if the directory does not answer.
    """
    lost = LostHost(incarnation=incarnation, job=job)
    _add(names, "report a lost host", keys.lost(host), lost)


def _add(
    names: NameStore, what: str, key: str, report: Failure | LostHost, *, replace: bool = True
) -> None:
    value = json.dumps(documents.to_json(report))
    retry(what, lambda: names.add(key, value, replace=replace), timeout_s=PUBLISH_TIMEOUT_S)


def publish_hang(
    names: NameStore,
    events: EventWriter,
    incarnation: int,
    rows: Sequence[RankProgress],
    files: Sequence[str],
) -> None:
    """Log the explanation of a hang, write it as an event and publish it for `slurmrl status`.

    ``files`` are the names of the files with the stacks.
    """
    explained = Hang(text=explain(grouped(rows)), files=tuple(files))
    logger.error("%s; stacks: %s", explained.text, ", ".join(files) or "none")
    events.write("hang", incarnation=incarnation, text=explained.text, files=list(files))
    value = json.dumps(documents.to_json(explained))
    try:
        names.add(keys.hang(incarnation), value)
    except NameExistsError:
        return
    except EnvironmentFailure as error:
        logger.warning("cannot publish the explanation of the hang: %s", error)
