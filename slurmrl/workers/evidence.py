"""What the ranks did when an incarnation was ended for silence or a deadline, kept for people."""

from __future__ import annotations

import json
from collections.abc import Sequence

from slurmrl import keys, log
from slurmrl.errors import EnvironmentFailure, NameExistsError
from slurmrl.monitor import hang
from slurmrl.monitor.events import EventWriter
from slurmrl.name_resolve.base import NameStore
from slurmrl.workers.failure import Cause, Failure
from slurmrl.workers.messages import Message

logger = log.get(__name__)

COLLECT_S = 15.0
"""How long the master waits for the stacks of all hosts."""
CAUSES = (Cause.HUNG, Cause.DEADLINE)
"""Failures that are explained by what the ranks were doing."""


def is_hang(failure: Failure) -> bool:
    return failure.get("cause") in CAUSES


def publish(
    names: NameStore,
    events: EventWriter,
    incarnation: int,
    rows: Sequence[Message],
    files: Sequence[str],
) -> None:
    """Say it in the name store, for the story, and as an event. ``rows``: see `monitor.hang`."""
    told = {"text": hang.explain(hang.grouped(rows)), "files": list(files)}
    logger.error("%s; stacks: %s", told["text"], ", ".join(files) or "none")
    events.write("hang", incarnation=incarnation, **told)
    try:
        names.add(keys.hang(incarnation), json.dumps(told), delete_on_exit=False)
    except NameExistsError:
        return
    except EnvironmentFailure as error:
        logger.warning("the hang is not explained in the story: %s", error)
