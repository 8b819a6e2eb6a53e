"""Publisher of the run's status for ``slurmrl status``; ages are by the master's clock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurmrl import keys, log
from slurmrl.backoff import Interval
from slurmrl.channel import frame
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.fsio import objects
from slurmrl.lease import LeaseObserver, LeaseView
from slurmrl.monitor import hang, metrics
from slurmrl.monitor.hang import LeaseNote, RankProgress
from slurmrl.monitor.reports import Identity
from slurmrl.monitor.rollouts import RolloutsView
from slurmrl.name_resolve.base import NameStore
from slurmrl.paths import RunPaths

logger = log.get(__name__)


class StatusPublisher:
    """Replaces the status value once per interval, and at every update."""

    def __init__(
        self,
        names: NameStore,
        paths: RunPaths,
        agents: Mapping[str, Identity],
        *,
        incarnation: int,
        total_steps: int | None,
        lease_ttl_s: float,
        interval_s: float,
    ) -> None:
        self._names = names
        self._paths = paths
        self._agents = agents
        self._lease_ttl_s = lease_ttl_s
        self._observers: dict[Path, LeaseObserver] = {}
        self._views: dict[str, LeaseView] = {}
        """By label of the agents that are known now."""
        self._tasks: dict[str, Any] = {}
        """The agents' leases as read last."""
        self._looks = Interval(interval_s, time.monotonic)
        self._committed: tuple[int, float] | None = None
        self._status: dict[str, Any] = {
            "incarnation": incarnation,
            "step": 0,
            "total_steps": total_steps,
            "phase": "starting",
            "metrics": {},
            "checkpoint_failed": None,
            "waiting": None,
            "doing": [],
        }

    def update(self, **changes: Any) -> None:
        """Change the status and publish it now: ``step``, ``total_steps``, ``metrics``, ``phase``,
        ``checkpoint_failed`` (step and reason of the newest, until one succeeds)."""
        self._status.update(changes, waiting=None)
        self._publish_now()

    def committed(self, step: int) -> None:
        self._committed = (step, time.monotonic())
        self._status["checkpoint_failed"] = None
        self._publish_now()

    def tick(
        self,
        waiting: Callable[[], Mapping[str, Any] | None] = lambda: None,
        rollouts: Callable[[], RolloutsView] | None = None,
    ) -> None:
        """Publish when the interval has passed, with what is waited for."""
        if self._looks.due():
            self._status["waiting"] = waiting()
            if rollouts is not None:
                self._status["rollouts"] = objects.to_json(rollouts())
            self._look_at_agents()
            self._publish()

    def doing(self) -> list[RankProgress]:
        """Return what the ranks were doing when the agents' leases were read last."""
        rows: list[RankProgress] = []
        for view in self._views.values():
            try:
                frames, _ = frame.decode(view.note)
                notes = [objects.from_json(LeaseNote, values, "a lease") for values in frames[:1]]
            except CorruptFileError:
                continue
            for note in notes:
                if note.incarnation == self._status["incarnation"]:
                    rows += note.doing
        return rows

    def dead(self) -> list[str]:
        """Return the agents whose lease had expired when it was read last, apart from those that
        were started again since."""
        return [
            label
            for label, view in self._views.items()
            if not view.alive
            and label in self._agents
            and self._tasks[label]["attempt"] == self._agents[label].attempt
        ]

    def _publish_now(self) -> None:
        """Publish before the interval has passed; the agents are looked at once per interval."""
        if self._looks.due():
            self._look_at_agents()
        self._publish()

    def _look_at_agents(self) -> None:
        self._views = {label: self._view(self._agents[label]) for label in sorted(self._agents)}
        self._tasks = {label: self._task(label) for label in self._views}
        self._status["doing"] = [group.document() for group in hang.grouped(self.doing())]

    def _publish(self) -> None:
        checkpoint = None
        if self._committed is not None:
            step, committed_at = self._committed
            checkpoint = {"step": step, "age_s": time.monotonic() - committed_at}
        value = {
            **self._status,
            "metrics": metrics.finite(self._status["metrics"]),
            "checkpoint": checkpoint,
            "tasks": self._tasks,
            "time": time.time(),
        }
        try:
            self._names.add(
                keys.status(), json.dumps(value), replace=True, delete_on_exit=False, durable=False
            )
        except EnvironmentFailure as error:  # only the display is delayed
            logger.warning("cannot publish the status, will retry: %s", error)

    def _view(self, agent: Identity) -> LeaseView:
        path = self._paths.lease(agent.group, agent.task, agent.attempt)
        if path not in self._observers:
            self._observers[path] = LeaseObserver(path, ttl_s=self._lease_ttl_s)
        return self._observers[path].observe()

    def _task(self, label: str) -> dict[str, Any]:
        agent = self._agents[label]
        return {
            "lease_age_s": self._views[label].age_s,
            "host": agent.host,
            "attempt": agent.attempt,
            "job_id": agent.job_id,
        }
