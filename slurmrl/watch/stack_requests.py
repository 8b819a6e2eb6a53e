"""Requests to the processes of a running trial for their stacks."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from slurmrl.backoff import Backoff
from slurmrl.errors import NameExistsError, UsageError
from slurmrl.fsio import atomic, objects
from slurmrl.fsio.failures import corrupt
from slurmrl.name_resolve.store import NameStore
from slurmrl.run import keys
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import TRAINERS, StacksRequest
from slurmrl.watch.log_files import serving
from slurmrl.watch.snapshot import read_groups

POLL_S = (0.1, 2.0)
"""First and longest pause between two looks for answers."""


class Request:
    """One request to the running incarnation, and the files that answer it: one per host."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files
        """Files that were not read yet, by ``group/task``."""

    @classmethod
    def make(cls, paths: RunPaths, incarnation: int, rank: int | None) -> Request:
        """Request the stacks of one rank of the trainers, or of all their processes.

        Raises UsageError for a rank that does not exist, CorruptFileError for a plan that does not
        name the ranks' hosts, EnvironmentFailure.
        """
        group = next((group for group in read_groups(paths) if group.name == TRAINERS), None)
        if group is None:
            lacks = "has no trainers" if paths.plan.exists() else "is missing"
            raise corrupt(paths.plan, lacks)
        count = group.hosts * group.workers_per_host
        if rank is not None and rank >= count:
            raise UsageError(f"no rank {rank}: the trial has ranks 0 to {count - 1}")
        tasks = range(group.hosts) if rank is None else [rank // group.workers_per_host]
        attempts = serving(paths, incarnation)
        number = _ask(paths, incarnation, rank)
        return cls(
            {
                f"{group.name}/{task}": paths.stacks(
                    group.name, task, attempts[group.name, task], incarnation, number
                )
                for task in tasks
                if (group.name, task) in attempts
            }
        )

    @property
    def missing(self) -> list[str]:
        """The hosts that have not answered."""
        return list(self._files)

    def answers(
        self, timeout_s: float, sleep: Callable[[float], None] = time.sleep
    ) -> Iterator[str]:
        """Yield the stacks as they arrive, until all have arrived or the time is over."""
        deadline = time.monotonic() + timeout_s
        backoff = Backoff(*POLL_S, sleep=sleep)
        while self._files:
            for label, path in tuple(self._files.items()):
                try:
                    text = atomic.read(path).decode(errors="replace")
                except FileNotFoundError:
                    continue
                del self._files[label]
                backoff.reset()
                yield text
            if time.monotonic() >= deadline:
                return
            if self._files:
                backoff.sleep()


def _ask(paths: RunPaths, incarnation: int, rank: int | None) -> int:
    """Publish the request and return its number."""
    ranks = None if rank is None else (rank,)
    value = json.dumps(objects.to_json(StacksRequest(ranks, time.time())))
    names = NameStore(paths.names)
    for number in itertools.count(1):
        try:
            names.add(keys.stacks(incarnation, number), value)
        except NameExistsError:
            continue
        return number
    raise AssertionError("unreachable: requests are unbounded")
