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
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO, Any, TypeVar

from slurmrl import keys, log
from slurmrl.backoff import Backoff
from slurmrl.channel.follower import Follower
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
from slurmrl.fsio import ownership
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
from slurmrl.workers.agent.keeper import Keeper
from slurmrl.workers.messages import Message
from slurmrl.workers.pace import Pace
from slurmrl.workers.patience import patiently

logger = log.get(__name__)
T = TypeVar("T")

FORM_TIMEOUT_S = 600.0
"""Longest wait for the incarnation to begin and for rank 0's address."""
LATE_BEGIN_S = 30.0
"""Longest wait for the incarnation to begin when this host has failed already."""
EXIT_TIMEOUT_S = 60.0
"""Longest wait for workers that were told to exit, and for a directory that does not answer when
a failure is to be reported."""
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


class Agent:
    def __init__(self, paths: RunPaths, submission: int, group: str) -> None:
        self.paths = paths
        self.submission = submission
        self.cluster = load_resolved(paths.config).cluster
        self.plan = Plan.read(paths.plan)
        self.group = self.plan.group(group)
        self.history = History(paths.history)
        names = make("file", directory=paths.names)
        self.identity = claim(names, group, elastic=self.group.elastic)
        self.pace = Pace.of(self.group.hosts, self.cluster.heartbeat_s)
        lease = paths.lease(group, self.identity.task, self.identity.attempt)
        self.names = make("file", directory=paths.names, owner=lease.name)
        self.keeper = Keeper(
            Lease(lease).beat,
            self._check_fence,
            beat_s=self.pace.beat_s,
            check_s=self.pace.check_s,
            ttl_s=self.cluster.lease_ttl_s,
        )
        self.children = Children(paths, self.group, self.identity)
        self.incarnation = 0
        self.replies: LogWriter | None = None
        self._unsaid = False
        """Whether something waits in `replies` that the directory did not take."""
        self._signals: list[int] = []

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
            self._learn_incarnation()
            self._report_failure({"reason": str(error), "host": self.identity.host})
            return 1
        finally:
            self.children.close()
            self._forget()
        return 0

    def _serve(self) -> None:
        if self.identity.task == 0:
            with self._open_log("master") as output:
                self.children.start_master(self.submission, output)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        devices = gpu.assign(visible, self.group.workers_per_host, self.group.gpus_per_worker)
        with self._open_log(self.group.name) as output:
            self.children.start_workers(devices, self.cluster.slurm.container, output)
        state = self._wait("the master to begin", self._begun, FORM_TIMEOUT_S)
        self._form(state, devices)
        self._relay()

    def _take_log(self) -> None:
        """What this process prints goes to the task's log from now on."""
        with self._open_log(self.group.name) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)

    def _open_log(self, group: str) -> IO[bytes]:
        path = self.paths.log(group, self.identity.task, self.identity.attempt)
        return self._patiently("open a log", lambda: process.open_log(path))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    # -- forming an incarnation --------------------------------------------------------------

    def _learn_incarnation(self) -> None:
        """A failure before our incarnation has begun counts as its failure, or starting over
        would never come to an end: give the master time to begin."""
        backoff = Backoff()
        deadline = time.monotonic() + LATE_BEGIN_S
        try:
            while self.incarnation == 0 and time.monotonic() < deadline:
                master = self.children.master
                gone = master is not None and master.ended() is not None
                if (state := self._begun()) is not None:
                    self.incarnation = state.incarnation
                elif gone:
                    return
                backoff.sleep()
        except SlurmrlError as error:
            logger.info("%s", error)

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
        path = self.paths.agent_log(self.incarnation, self.identity.group, self.identity.task)
        nonce = uuid.uuid4().hex
        self.replies = self._patiently("make a log", lambda: LogWriter(path, nonce=nonce))
        self._say({"type": messages.HELLO, **vars(self.identity)})
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
        self._publish(keys.store(self.incarnation), f"{host}:{port}", delete_on_exit=True)
        return listener

    def _find_store(self) -> str | None:
        try:
            return self.names.get(keys.store(self.incarnation))
        except NameNotFoundError:
            self.names.refresh()
            return None

    def _publish(self, key: str, value: str, *, delete_on_exit: bool = False) -> None:
        """Add a key whose value nobody else can have."""

        def add() -> None:
            try:
                self.names.add(key, value, delete_on_exit=delete_on_exit)
            except NameExistsError:  # an earlier try may have got through after all
                if self.names.get(key) != value:
                    raise

        self._patiently(f"publish {key}", add)

    def _publish_devices(self, devices: list[str]) -> None:
        value = {
            "job_id": self.identity.job_id,
            "host": self.identity.host,
            "given": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "workers": devices,
        }
        key = keys.devices(self.incarnation, self.identity.group, self.identity.task)
        self._publish(key, json.dumps(value))

    # -- relaying ----------------------------------------------------------------------------

    def _relay(self) -> None:
        """Hand the master's messages to the workers until it says exit; none while our lease may
        be lost."""
        master = Follower(
            [LogReader(self.paths.master_log(self.incarnation))],
            self.paths.control,
            longest_poll_s=self.pace.poll_s,
        )
        self.children.wake_on(master)
        waiting: deque[Message] = deque()
        while True:
            waiting += master.read()
            while waiting and self.keeper.may_start():
                message = waiting.popleft()
                self.children.broadcast(message)
                if message["type"] == messages.EXIT:
                    self._wait("workers to exit", self._all_ended, EXIT_TIMEOUT_S)
                    return
            self._turn_until_news(master, may_stop=bool(waiting))

    def _turn_until_news(self, master: Follower, *, may_stop: bool) -> None:
        """One turn, and on until the master's log is to be read again. With ``may_stop`` one."""
        end = time.monotonic() + master.pause_s()
        while True:
            left_s = end - time.monotonic()
            self._turn(min(max(left_s, 0.0), self.pace.beat_s))
            if may_stop or master.woken or left_s <= self.pace.beat_s:
                return

    def _all_ended(self) -> bool | None:
        return True if self.children.all_ended() else None

    def _check_fence(self) -> None:
        """Leave when a newer incarnation has begun, or the trial was cancelled or given up. (A
        finished one says exit in its log.) Raises EnvironmentFailure."""
        if self.incarnation == 0:
            return
        state = fold(self.history.read())
        if state.incarnation > self.incarnation:
            raise StaleIncarnationError(f"incarnation {state.incarnation} has begun")
        finished = state.end is not None and state.end.kind is Kind.FINISHED
        if state.ended_slot > state.begin_slot and not finished:
            how = "and was resumed since" if state.end is None else f"({state.end.kind})"
            raise TrialEndedError(f"the trial has ended {how}")

    # -- one turn of the loop ----------------------------------------------------------------

    def _wait(self, what: str, poll: Callable[[], T | None], timeout_s: float) -> T:
        """Poll until there is a value; time in which the directory does not answer does not
        count."""
        backoff = Backoff(last_s=min(self.pace.poll_s, self.pace.beat_s))
        waited_s = 0.0
        while (value := self._patiently(f"wait for {what}", poll)) is None:
            if waited_s > timeout_s:
                raise WaitTimeoutError(
                    f"{self.identity.label} on {self.identity.host} waited {timeout_s:.0f} s "
                    f"for {what}"
                )
            began = time.monotonic()
            self._turn(backoff.next_s())
            waited_s += time.monotonic() - began
        return value

    def _patiently(self, what: str, action: Callable[[], T]) -> T:
        """Do something on the shared directory, again and again while that does not answer."""
        return patiently(what, action, self._turn)

    def _turn(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` for a child to speak or end; beat the lease when due."""
        self.keeper.turn()
        heard, ended = self.children.turn(timeout_s)
        if self._signals and self.replies is not None:  # else it is told once we can
            heard.append(self._warning(self._signals.pop()))
            self._signals.clear()
        error = next((one for one in heard if one["type"] == messages.ERROR), None)
        if error is not None:  # first: the master would report it without its traceback
            self._report_failure({**error, "host": self.identity.host})
        self._say(*heard)
        if error is not None:
            raise WorkerDiedError(f"rank {error['rank']}: {error['exception']}")
        check(ended)

    def _forget(self) -> None:
        """Take back the names that end with this process; without this they do with its lease."""
        try:
            self.names.reset()
        except EnvironmentFailure as error:
            logger.warning("cannot take back our names: %s", error)

    def _say(self, *news: Message) -> None:
        """Tell the master. What the directory does not take now goes first the next time."""
        if self.replies is None or not (news or self._unsaid):
            return
        self._unsaid = True
        try:
            self.replies.append(*news)
            self._unsaid = False
        except EnvironmentFailure as error:
            logger.warning("cannot tell the master, trying on: %s", error)

    def _warning(self, number: int) -> Message:
        name = signal.Signals(number).name
        logger.info("received %s: this job is to end soon", name)
        return {"type": messages.WARNING, "signal": name}

    def _report_failure(self, failure: dict[str, Any]) -> None:
        """Publish why this incarnation failed, unless somebody was first."""
        if self.incarnation == 0:
            return
        key = keys.failure(self.incarnation)
        try:
            patiently(
                "report the failure",
                lambda: self.names.add(key, json.dumps(failure), delete_on_exit=False),
                timeout_s=EXIT_TIMEOUT_S,
            )
        except NameExistsError:
            logger.info("another failure was reported first")
        except EnvironmentFailure as error:
            logger.error("nobody could be told of the failure: %s", error)


def serve(run: Path, submission: int, group: str) -> int:
    """Exit code of an agent in the directory ``run``. Raises SlurmrlError where it cannot start."""

    def start() -> Agent:
        for warning in ownership.check(run):
            logger.warning("%s", warning)
        return Agent(RunPaths(run), submission, group)

    return patiently("start", start, timeout_s=FORM_TIMEOUT_S).run()
