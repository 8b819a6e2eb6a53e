"""Explanations of hangs: what the ranks did when silence or a deadline ended an incarnation."""

from __future__ import annotations

import json
from collections.abc import Sequence

from slurmrl import log
from slurmrl.errors import EnvironmentFailure, NameExistsError
from slurmrl.fsio import objects
from slurmrl.name_resolve.base import NameStore
from slurmrl.run import hang, keys
from slurmrl.run.events import EventWriter
from slurmrl.run.hang import RankProgress
from slurmrl.run.reports import Hang

logger = log.get(__name__)

COLLECT_S = 15.0
"""How long the master waits for the stacks of all hosts."""


def publish(
    names: NameStore,
    events: EventWriter,
    incarnation: int,
    rows: Sequence[RankProgress],
    files: Sequence[str],
) -> None:
    """Log the explanation, write it as an event and add it to the name store, where `status` reads
    it. ``files`` hold the stacks."""
    explained = Hang(text=hang.explain(hang.grouped(rows)), files=tuple(files))
    logger.error("%s; stacks: %s", explained.text, ", ".join(files) or "none")
    events.write("hang", incarnation=incarnation, text=explained.text, files=list(files))
    value = json.dumps(objects.to_json(explained))
    try:
        names.add(keys.hang(incarnation), value, delete_on_exit=False)
    except NameExistsError:
        return
    except EnvironmentFailure as error:
        logger.warning("cannot publish the explanation of the hang: %s", error)
