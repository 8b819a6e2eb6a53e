"""The identity of an agent: its task, its attempt at that task, its host and its job."""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from slurmrl import env, keys
from slurmrl.errors import NameExistsError
from slurmrl.name_resolve.base import NameStore
from slurmrl.worlds import TRAINERS, world_of


@dataclass(frozen=True)
class Identity:
    group: str
    task: int
    """Host index in a fixed group, array index in an elastic one."""
    attempt: int
    """Number of earlier starts of this task."""
    host: str
    job: str
    """The round of agents that this one belongs to: job id, Slurm's restart count, round."""
    job_id: str
    """The job as Slurm's commands name it; ``123_4`` for an array element."""
    pid: int

    @property
    def label(self) -> str:
        return f"{self.group}/{self.task}"

    @property
    def trains(self) -> bool:
        """Whether this is an agent of the trainers."""
        return self.group == TRAINERS

    @property
    def world(self) -> str:
        """The world that its workers belong to."""
        return world_of(self.group, self.task)


def job_name(environ: Mapping[str, str]) -> str:
    array = env.ARRAY_JOB_ID.get(environ)
    return f"{array}_{env.LINK.get(environ)}" if array else env.JOB_ID.get(environ)


def claim(
    store: NameStore, group: str, *, elastic: bool, environ: Mapping[str, str] = os.environ
) -> Identity:
    """Claim the next free attempt at this process's task."""
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
                json.dumps(asdict(identity)),
                delete_on_exit=False,
            )
        except NameExistsError:
            continue
        return identity
    raise AssertionError("unreachable: attempts are unbounded")
