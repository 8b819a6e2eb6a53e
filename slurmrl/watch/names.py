"""The entries of a trial's name store: keys, values, owners, and whether owners are alive."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from slurmrl.name_resolve.file import FileNameStore
from slurmrl.run.lease import LeaseBoard
from slurmrl.run.paths import RunPaths
from slurmrl.watch.snapshot import newest_submission

HEARTBEATS = 1.5
"""Heartbeat intervals to wait for leases to move."""
LOOK_S = 0.2


def collect(
    paths: RunPaths,
    prefix: str,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[dict[str, Any]]:
    """Return one object per key below ``prefix``: ``key``, ``value``, ``owner`` (a lease, or null),
    ``alive`` (whether the lease moved during this call; null without an owner) and ``lease_age_s``
    (how long the lease was seen not to move). Clocks of other hosts are not trusted, so the call
    takes up to 1.5 heartbeats if a lease does not move.
    """
    entries = FileNameStore(paths.names).entries(prefix)
    owners = sorted({entry.owner for entry in entries.values() if entry.owner})
    ages = _watch(paths, owners, sleep, clock)
    return [
        {
            "key": key,
            "value": entry.value,
            "owner": entry.owner or None,
            "alive": ages[entry.owner] is None if entry.owner else None,
            "lease_age_s": (ages[entry.owner] or 0.0) if entry.owner else None,
        }
        for key, entry in entries.items()
    ]


def _watch(
    paths: RunPaths,
    owners: list[str],
    sleep: Callable[[float], None],
    clock: Callable[[], float],
) -> dict[str, float | None]:
    """Return how long each lease was seen not to move; None for those that moved."""
    submission = newest_submission(paths)
    longest_s = HEARTBEATS * (submission.heartbeat_s if submission is not None else 0.0)
    board = LeaseBoard(paths.leases, ttl_s=float("inf"), look_s=0.0, clock=clock)
    first = {owner: board.view(owner).counter for owner in owners}
    ages: dict[str, float | None] = dict.fromkeys(owners, 0.0)
    end = clock() + longest_s
    while owners and clock() < end:
        sleep(LOOK_S)
        for owner in owners:
            view = board.view(owner)
            ages[owner] = view.age_s if view.counter == first[owner] else None
        owners = [owner for owner in owners if ages[owner] is not None]
    return ages
