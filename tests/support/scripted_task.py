"""A rollout task without an engine, which talks to the master's side of rollout tasks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from slurmrl.data.ledger import LeasedItems
from slurmrl.rollouts.sample_files import SampleGroup, SampleWriter
from slurmrl.run.channel.message_log import LogReader, LogWriter
from slurmrl.run.channel.wakeups import WakeupAddress
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Identity
from slurmrl.workers.rollout_messages import (
    REQUEST_LOG,
    RESULT_LOG,
    Abort,
    Confirm,
    GaveBack,
    GroupsFinished,
    Holds,
    Joined,
    Leave,
    Leaving,
    RolloutRequest,
    RolloutResult,
)
from tests.support.sample_groups import small_group


class ScriptedTask:
    """An attempt at a rollout task, controlled by a test."""

    def __init__(self, paths: RunPaths, task: int, attempt: int) -> None:
        self.place = "rollout", task, attempt
        self.name = f"rollout.{task}.{attempt}"
        self.agent = Identity("rollout", task, attempt, f"r{task}", "50.0.0", f"50_{task}", 1)
        self.version = ""
        self.open: dict[int, str] = {}
        """Leases of the requested items that have no answer yet, by item."""
        self.answered: set[tuple[str, int]] = set()
        self.leaving = False
        self.master: WakeupAddress | None = None
        self._paths = paths
        self._samples = SampleWriter(paths.rollout_samples(*self.place))
        self._log = LogWriter(paths.rollout_results(*self.place))
        self._requests: dict[int, LogReader] = {}
        self.say(Joined(agent=self.agent))

    def say(self, *results: RolloutResult) -> None:
        self._log.append(*map(RESULT_LOG.to_json, results))

    def hold(self, version: str) -> None:
        self.version = version
        self.say(Holds(version=version))

    def receive(self, incarnation: int) -> list[RolloutRequest]:
        """Read and follow the new requests of an incarnation."""
        if incarnation not in self._requests:
            path = self._paths.rollout_requests(*self.place, incarnation)
            self._requests[incarnation] = LogReader(path)
        found = list(map(REQUEST_LOG.from_json, self._requests[incarnation].read()))
        for request in found:
            self._follow(request)
        return found

    def _follow(self, request: RolloutRequest) -> None:
        match request:
            case Confirm():
                self.open, self.master = {}, request.wakeups
                for lease in request.leases:
                    self._follow(lease)
            case LeasedItems():
                wanted = dict.fromkeys(request.items, request.lease)
                self.open |= {i: n for i, n in wanted.items() if (n, i) not in self.answered}
            case Abort():
                for item in request.items:
                    if self.open.get(item) == request.lease:
                        del self.open[item]
            case Leave():
                self.leaving = True

    def finish(self, *items: int, versions: tuple[str, ...] = ()) -> None:
        """Write the groups of open items to one file, and record them."""
        groups = [self._group(item, self.open[item], versions or (self.version,)) for item in items]
        self.record(groups)
        for item in items:
            self.answered.add((self.open.pop(item), item))

    def record(self, groups: list[SampleGroup]) -> None:
        self.say(GroupsFinished(groups=self._samples.write(groups)))

    def _group(self, item: int, lease: str, versions: tuple[str, ...]) -> SampleGroup:
        last = len(versions) - 1
        drawn = np.array([-1, 0, last, -1, last], np.int32)
        return replace(small_group(item, lease), versions=versions, drawn_by=drawn)

    def give_back(self, *items: int) -> None:
        """Return the items, as only a retiring task does."""
        for item in items:
            self.leaving = True
            lease = self.open.pop(item)
            self.answered.add((lease, item))
            self.say(GaveBack(lease=lease, items=(item,), reason="full"))

    def leave(self) -> None:
        """Return all open items, and leave."""
        self.give_back(*self.open)
        self.say(Leaving(reason="preemption"))
