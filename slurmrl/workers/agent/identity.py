"""The claim of an agent's identity."""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Mapping

from slurmrl import env
from slurmrl.errors import NameExistsError
from slurmrl.fsio import objects
from slurmrl.name_resolve.base import NameStore
from slurmrl.run import keys
from slurmrl.run.reports import Identity


def job_name(environ: Mapping[str, str]) -> str:
    array = env.ARRAY_JOB_ID.get(environ)
    return f"{array}_{env.LINK.get(environ)}" if array else env.JOB_ID.get(environ)


def claim(
    store: NameStore,
    group: str,
    *,
    elastic: bool,
    task: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Identity:
    """Claim the next free attempt at a task; None: that of this array element or host."""
    if task is None:
        task = env.LINK.get(environ) if elastic else env.NODE_ID.get(environ)
    start = f"{env.RESTART_COUNT.get(environ)}.{env.ROUND.get(environ)}"
    job = f"{env.JOB_ID.get(environ) or os.getpid()}.{start}"
    host = env.NODE_NAME.get(environ) or socket.gethostname()
    taken = len(store.find_subtree(keys.attempts(group, task)))
    for attempt in itertools.count(taken):
        identity = Identity(group, task, attempt, host, job, job_name(environ), os.getpid())
        try:
            store.add(
                keys.attempt(group, task, attempt),
                json.dumps(objects.to_json(identity)),
                delete_on_exit=False,
            )
        except NameExistsError:
            continue
        return identity
    raise AssertionError("unreachable: attempts are unbounded")
