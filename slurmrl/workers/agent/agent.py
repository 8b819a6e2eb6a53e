"""One agent's life: claim the task, start workers (and the master), form the incarnation, relay
messages until it ends.

Every wait goes through `_turn`, which also beats the lease, collects what the children say and
notices children that ended; so nothing that happens on this host goes unseen while waiting.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from slurmrl import keys, log
from slurmrl.backoff import Backoff
from slurmrl.channel.log import LogReader, LogWriter
from slurmrl.config.load import load_resolved
from slurmrl.errors import (
    EnvironmentFailure,
    NameExistsError,
    NameNotFoundError,
    SlurmrlError,
    StaleIncarnationError,
    TrialEndedError,
    WaitTimeoutError,
    WorkerDiedError,
)
from slurmrl.history.log import History
from slurmrl.history.record import Kind
from slurmrl.history.state import TrialState, fold
from slurmrl.lease import Lease
from slurmrl.name_resolve import make
from slurmrl.parallel import gpu
from slurmrl.paths import RunPaths
from slurmrl.plan.model import Plan
from slurmrl.workers import messages, process
from slurmrl.workers.agent import address
from slurmrl.workers.agent.children import Children, check
from slurmrl.workers.agent.identity import claim
from slurmrl.workers.messages import Message

logger = log.get(__name__)
T = TypeVar("T")

FORM_TIMEOUT_S = 600.0
"""Longest wait for the incarnation to begin and for rank 0's address."""
EXIT_TIMEOUT_S = 60.0
"""Longest wait for workers that were told to exit."""
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


class Agent:
    def __init__(self, paths: RunPaths, submission: int, group: str) -> None:
        self.paths = paths
        self.submission = submission
        self.cluster = load_resolved(paths.config).cluster
        self.plan = Plan.from_json(paths.plan.read_text())
        self.group = self.plan.group(group)
        self.names = make("file", directory=paths.names)
        self.history = History(paths.history)
        self.identity = claim(self.names, group, elastic=self.group.elastic)
        self.lease = Lease(paths.lease(group, self.identity.task, self.identity.attempt))
        self.children = Children(paths, self.group, self.identity)
        self.incarnation = 0
        self.replies: LogWriter | None = None
        self._signals: list[int] = []
        self._next_beat = 0.0

    # -- the whole life ----------------------------------------------------------------------

    def run(self) -> int:
        """Serve one incarnation; 0 when it ended as it should."""
        self._take_log()
        for number in WARNINGS:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)  # the supervisor held them back
        try:
            self._serve()
        except TrialEndedError as end:
            logger.info("%s", end)
        except SlurmrlError as error:
            logger.error("%s", error)
            self._report_failure({"reason": str(error), "host": self.identity.host})
            return 1
        finally:
            self.children.close()
        return 0

    def _serve(self) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        devices = gpu.assign(visible, self.group.workers_per_host, self.group.gpus_per_worker)
        self.children.start_workers(devices, self.cluster.slurm.container)
        if self.identity.task == 0:
            self.children.start_master(self.submission)
        state = self._wait("the master to begin", self._begun, FORM_TIMEOUT_S)
        self._form(state, devices)
        self._relay()

    def _take_log(self) -> None:
        """What this process prints goes to the task's log from now on."""
        path = self.paths.log(self.identity.group, self.identity.task, self.identity.attempt)
        with process.open_log(path) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    # -- forming an incarnation --------------------------------------------------------------

    def _begun(self) -> TrialState | None:
        """The trial's state once this job's master has begun an incarnation."""
        state = fold(self.history.read())
        if state.end is not None:
            raise TrialEndedError(f"the trial has ended ({state.end.kind}); nothing to do")
        return state if state.begin_data.get("job") == self.identity.job else None

    def _form(self, state: TrialState, devices: list[str]) -> None:
        """Join incarnation ``state.incarnation``: open our log, meet at rank 0's address, and
        tell each worker where that is and which commit to load."""
        self.incarnation = state.incarnation
        logger.info("incarnation %d", self.incarnation)
        self.replies = LogWriter(
            self.paths.agent_log(self.incarnation, self.identity.group, self.identity.task)
        )
        self.replies.append({"type": messages.HELLO, **vars(self.identity)})
        self._publish_devices(devices)
        own = address.fabric_address(self.cluster.interface, self.group.hosts)
        listener = self._publish_store(own) if self.children.first_rank == 0 else None
        start = {
            "type": messages.START,
            "store": self._wait("rank 0's address", self._find_store, FORM_TIMEOUT_S),
            "world_size": self.plan.world_size,
            "interface": address.interface_of(own),
            "base": state.last_commit.directory if state.last_commit is not None else None,
        }
        for worker in self.children.workers:
            if worker.rank == 0 and listener is not None:
                worker.pipe.send_with_fd(start, listener.fileno())
                listener.close()
            else:
                worker.pipe.send(start)

    def _publish_store(self, own: str) -> socket.socket:
        """Bind rank 0's listening socket here, so that its port is ours before anyone is told."""
        listener = address.listen(own)
        host, port = listener.getsockname()
        self.names.add(keys.store(self.incarnation), f"{host}:{port}", delete_on_exit=False)
        return listener

    def _find_store(self) -> str | None:
        try:
            return self.names.get(keys.store(self.incarnation))
        except NameNotFoundError:
            return None

    def _publish_devices(self, devices: list[str]) -> None:
        value = {
            "job_id": self.identity.job_id,
            "host": self.identity.host,
            "given": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "workers": devices,
        }
        key = keys.devices(self.incarnation, self.identity.group, self.identity.task)
        self.names.add(key, json.dumps(value), delete_on_exit=False)

    # -- relaying ----------------------------------------------------------------------------

    def _relay(self) -> None:
        """Hand the master's messages to the workers until it says exit."""
        reader = LogReader(self.paths.master_log(self.incarnation))
        backoff = Backoff()
        next_check = time.monotonic() + self.cluster.heartbeat_s
        while True:
            for message in self._read(reader):
                backoff.reset()
                self.children.broadcast(message)
                if message["type"] == messages.EXIT:
                    self._wait("workers to exit", self._all_ended, EXIT_TIMEOUT_S)
                    return
            self._turn(backoff.next_s())
            if time.monotonic() >= next_check:
                self._check_fence()
                next_check = time.monotonic() + self.cluster.heartbeat_s

    def _read(self, reader: LogReader) -> list[Message]:
        """New messages; none while the shared directory does not answer."""
        try:
            return reader.read()
        except EnvironmentFailure as error:
            logger.warning("cannot read the control log, trying on: %s", error)
            return []

    def _all_ended(self) -> bool | None:
        return True if self.children.all_ended() else None

    def _check_fence(self) -> None:
        """Leave when a newer incarnation has begun, or the trial was cancelled or given up. (A
        finished one says exit in its log.)"""
        try:
            state = fold(self.history.read())
        except EnvironmentFailure as error:
            logger.warning("cannot read the history, trying on: %s", error)
            return
        if state.incarnation > self.incarnation:
            raise StaleIncarnationError(f"incarnation {state.incarnation} has begun")
        if state.end is not None and state.end.kind is not Kind.FINISHED:
            raise TrialEndedError(f"the trial has ended ({state.end.kind})")

    # -- one turn of the loop ----------------------------------------------------------------

    def _wait(self, what: str, poll: Callable[[], T | None], timeout_s: float) -> T:
        backoff = Backoff()
        deadline = time.monotonic() + timeout_s
        while (value := poll()) is None:
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"{self.identity.label} on {self.identity.host} waited {timeout_s:.0f} s "
                    f"for {what}"
                )
            self._turn(backoff.next_s())
        return value

    def _turn(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` for a child to speak or end; beat the lease when due."""
        self._beat()
        heard, ended = self.children.turn(timeout_s)
        if self._signals:
            heard.append(self._warning(self._signals.pop()))
            self._signals.clear()
        if heard and self.replies is not None:
            self.replies.append(*heard)
        for message in heard:
            if message["type"] == messages.ERROR:
                self._report_failure({**message, "host": self.identity.host})
                raise WorkerDiedError(f"rank {message['rank']}: {message['exception']}")
        check(ended)

    def _beat(self) -> None:
        """Beat the lease when it is due. A directory that does not answer ends nothing: the
        fence is looked at again once it does."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + self.cluster.heartbeat_s
        try:
            self.lease.beat()
        except EnvironmentFailure as error:
            logger.warning("cannot beat the lease, trying on: %s", error)

    def _warning(self, number: int) -> Message:
        name = signal.Signals(number).name
        logger.info("received %s: this job is to end soon", name)
        return {"type": messages.WARNING, "signal": name}

    def _report_failure(self, failure: dict[str, Any]) -> None:
        """Publish why this incarnation failed, unless somebody was first."""
        if self.incarnation == 0:
            return
        try:
            self.names.add(
                keys.failure(self.incarnation), json.dumps(failure), delete_on_exit=False
            )
        except NameExistsError:
            logger.info("another failure was reported first")


def serve(run: Path, submission: int, group: str) -> int:
    return Agent(RunPaths(run), submission, group).run()
