"""What the master says about the run, for ``slurmrl status``: ages are by its own clock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from slurmrl import keys, log
from slurmrl.channel import frame
from slurmrl.errors import CorruptFileError, EnvironmentFailure
from slurmrl.fsio.shapes import wrong
from slurmrl.lease import LeaseObserver, LeaseView
from slurmrl.monitor import hang, metrics, published
from slurmrl.name_resolve.base import NameStore
from slurmrl.paths import RunPaths
from slurmrl.workers.messages import Message

logger = log.get(__name__)


class StatusPublisher:
    """Replaces the status value at most once per interval, and whenever asked to."""

    def __init__(
        self,
        names: NameStore,
        paths: RunPaths,
        agents: Mapping[str, Message],
        *,
        incarnation: int,
        total_steps: int,
        lease_ttl_s: float,
        interval_s: float,
    ) -> None:
        self._names = names
        self._paths = paths
        self._agents = agents
        self._lease_ttl_s = lease_ttl_s
        self._interval_s = interval_s
        self._observers: dict[str, LeaseObserver] = {}
        self._views: dict[str, LeaseView] = {}
        self._tasks: dict[str, Any] = {}
        """What was seen of the agents' leases the last time the interval had passed."""
        self._next = 0.0
        self._committed: tuple[int, float] | None = None
        self._said: dict[str, Any] = {
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
        """Change what is said (``step``, ``metrics``, ``phase``,
        ``checkpoint_failed``: step and reason of the newest, until one succeeds) and say it now."""
        self._said.update(changes, waiting=None)
        self._publish()

    def committed(self, step: int) -> None:
        self._committed = (step, time.monotonic())
        self._said["checkpoint_failed"] = None
        self._publish()

    def tick(self, waiting: Callable[[], Mapping[str, Any] | None] = lambda: None) -> None:
        """Say it again when the interval has passed, and which ranks are waited for."""
        if time.monotonic() >= self._next:
            self._said["waiting"] = waiting()
            self._publish()

    def doing(self) -> list[Message]:
        """What the ranks said that they do when the agents' leases were looked at last."""
        rows = []
        for view in self._views.values():
            try:
                notes, _ = frame.decode(view.note)
            except CorruptFileError:
                continue
            for note in notes[:1]:
                ours = note.get("incarnation") == self._said["incarnation"]
                if ours and wrong(note, published.NOTE, ("doing",)) is None:
                    rows += note["doing"]
        return rows

    def dead(self) -> list[str]:
        """Agents whose lease was not renewed for its time to live when it was looked at last."""
        return [label for label, view in self._views.items() if not view.alive]

    def _publish(self) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._interval_s
            self._tasks = {label: self._task(label) for label in sorted(self._agents)}
            self._said["doing"] = hang.grouped(self.doing())
        checkpoint = None
        if self._committed is not None:
            checkpoint = {"step": self._committed[0], "age_s": now - self._committed[1]}
        value = {
            **self._said,
            "metrics": metrics.finite(self._said["metrics"]),
            "checkpoint": checkpoint,
            "tasks": self._tasks,
            "time": time.time(),
        }
        try:
            self._names.add(keys.status(), json.dumps(value), replace=True, delete_on_exit=False)
        except EnvironmentFailure as error:  # people wait; the run need not
            logger.warning("cannot say how the run is doing, trying on: %s", error)

    def _task(self, label: str) -> dict[str, Any]:
        agent = self._agents[label]
        if label not in self._observers:
            path = self._paths.lease(agent["group"], agent["task"], agent["attempt"])
            self._observers[label] = LeaseObserver(path, ttl_s=self._lease_ttl_s)
        view = self._views[label] = self._observers[label].observe()
        return {
            "lease_age_s": view.age_s,
            "host": agent["host"],
            "attempt": agent["attempt"],
            "job_id": agent["job_id"],
        }
