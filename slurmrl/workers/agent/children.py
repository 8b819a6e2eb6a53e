"""The processes of one host: its workers, their fork server, and the master on the first host."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import IO, TypeAlias

from slurmrl import log
from slurmrl.config.schema.cluster import Cluster
from slurmrl.plan.model import GroupPlan
from slurmrl.run.channel.follower import Follower
from slurmrl.run.channel.pipe import Connection
from slurmrl.run.hang import RankProgress
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Failure, Identity, RankId
from slurmrl.workers import child_process
from slurmrl.workers.agent import fork_environment
from slurmrl.workers.messages import (
    FROM_FORK_SERVER,
    FROM_WORKER,
    TO_FORK_SERVER,
    TO_ROLLOUT_WORKER,
    TO_WORKER,
    Answer,
    Fork,
    ImportFailed,
    Kill,
    Order,
    Pulse,
    Retire,
    Serve,
    Start,
    StartRollout,
    WorkerEnded,
    WriteStacks,
)

logger = log.get(__name__)

ToWorker: TypeAlias = Start | Order | StartRollout | Serve | Retire
"""Messages to a worker. The last three types are only for workers of rollout tasks."""
END_TIMEOUT_S = 5.0
"""Seconds that the fork server may take to kill its workers before the agent kills it."""
RELEASE_S = 90.0
"""Seconds that a killed worker may take to exit. The GPU driver must unpin the worker's host memory
(a minute for 40 GiB) and free its GPU memory, and the kernel may wait for a file system."""
REPORT_S = 3.0
"""Seconds that the fork server may take to report exits. This limit is more than `LEFTOVERS_S`."""
MISSED_PULSES = 3
"""Number of missed pulses after which `slurmrl status` shows a rank as silent. The agent kills the
rank only after `silence_s`."""
MASTER = "the master"


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    name: str
    code: int
    """Exit code, negative for a signal."""
    rank: int | None
    """Rank of the worker; None for the master and the fork server."""
    why: str = ""
    """Reason that the process reported; empty without a reason."""

    def __str__(self) -> str:
        ending = child_process.ending(self.name, self.code)
        return f"{ending}: {self.why}" if self.why else ending


class Slot:
    """A rank of this host and its current worker."""

    def __init__(self, rank: RankId, host: str) -> None:
        self.rank = rank.rank
        self.name = f"{rank} on {host}"
        self.stacks_fd = child_process.new_stacks_file()
        """Descriptor of the file in which workers of the rank write their stacks on request."""
        self.pipe: Connection | None = None
        """Connection to the worker."""
        self.running = False
        """Whether a worker was requested and has not ended."""

    def fork(self, fork_server: Connection, devices: str) -> None:
        """Request a worker that sees ``devices`` (CUDA_VISIBLE_DEVICES)."""
        assert not self.running
        self.pipe, theirs = Connection.pair()
        request = Fork(rank=self.rank, environment=fork_environment.of_rank(devices))
        values = TO_FORK_SERVER.to_json(request)
        fork_server.send_with_fds(values, theirs.fileno(), self.stacks_fd)
        theirs.close()
        self.running = True

    def send(self, message: ToWorker) -> None:
        """Send a message to the worker."""
        assert self.pipe is not None
        if isinstance(message, StartRollout | Serve | Retire):
            self.pipe.send(TO_ROLLOUT_WORKER.to_json(message))
        else:
            self.pipe.send(TO_WORKER.to_json(message))


@dataclass
class News:
    """The events that one call of `Children.turn` found."""

    received: list[Answer] = field(default_factory=list)
    """Messages of workers to the master."""
    failures: list[Failure] = field(default_factory=list)
    """Exceptions that workers reported."""
    ended: list[Ended] = field(default_factory=list)


class Children:
    """Starts the processes of this host, receives their messages and ends them."""

    def __init__(
        self,
        paths: RunPaths,
        group: GroupPlan,
        identity: Identity,
        cluster: Cluster,
        defaults: Mapping[str, str] | None = None,
    ) -> None:
        """``defaults`` are variables for workers (see `agent.fork_environment`)."""
        self.paths = paths
        self.group = group
        self.identity = identity
        self.slots: list[Slot] = []
        self.fork_server: child_process.Child | None = None
        self._line: Connection | None = None
        """Connection to the fork server."""
        self._import_error = ""
        """Reason why the imports of the fork server failed."""
        self.master: child_process.Child | None = None
        self._master_pipe: Connection | None = None
        self._cluster = cluster
        self._defaults = defaults or {}
        self._pulse_s = child_process.pulse_interval_s(cluster.heartbeat_s, cluster.silence_s)
        self._watch: child_process.SilenceWatch[int | None] = child_process.SilenceWatch(
            cluster.silence_s
        )
        self._doing: dict[int, tuple[RankProgress, float]] = {}
        """Last reported activity of each rank, with the time of the report."""
        self._selector = selectors.DefaultSelector()
        self._news = News()

    @property
    def world(self) -> str:
        return self.identity.world

    @property
    def first_rank(self) -> int:
        """The first rank of this host in its world."""
        return self.identity.task * self.group.workers_per_host if self.identity.trains else 0

    @property
    def ranks(self) -> list[int]:
        return [slot.rank for slot in self.slots]

    # -- starting ----------------------------------------------------------------------------

    def start_workers(self, devices: list[str], output: IO[bytes]) -> None:
        """Fork one worker for each entry of ``devices``; the entry is its CUDA_VISIBLE_DEVICES.

        Start the fork server, which outlives its workers, if there is none. Raises
        EnvironmentFailure if its command cannot be executed.
        """
        if not self.slots:
            self.slots = [
                Slot(RankId(self.world, rank), self.identity.host)
                for rank in range(self.first_rank, self.first_rank + len(devices))
            ]
        line = self._line or self._start_fork_server(devices, output)
        for slot, visible in zip(self.slots, devices, strict=True):
            slot.fork(line, visible)
            assert slot.pipe is not None
            self._listen(slot.pipe.fileno(), partial(self._hear_worker, slot, slot.pipe))

    def _start_fork_server(self, devices: list[str], output: IO[bytes]) -> Connection:
        cluster = self._cluster
        given = fork_environment.of_fork_server(self.group, devices, os.environ, self._defaults)
        self._import_error = ""
        self.fork_server, line = child_process.spawn_with_pipe(
            f"the fork server of host {self.identity.host}",
            "slurmrl.workers.worker",
            [*self._options(), "--world", self.world],
            output=output,
            environment=given,
            interpreter=fork_environment.interpreter(cluster.slurm, given, cluster.env),
        )
        self._line = line
        self._listen(self.fork_server.pidfd, self._fork_server_ended)
        self._listen(line.fileno(), self._hear_fork_server)
        return line

    def start_master(self, submission: int, output: IO[bytes]) -> None:
        arguments = [*self._options(), "--submission", str(submission)]
        arguments += ["--job", self.identity.job]
        self.master, self._master_pipe = child_process.spawn_with_pipe(
            MASTER,
            "slurmrl.workers.master",
            arguments,
            output=output,
            environment={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        self._listen(self.master.pidfd, partial(self._master_ended, self.master))
        self._listen(self._master_pipe.fileno(), partial(self._hear_master, self._master_pipe))

    def _options(self) -> list[str]:
        return ["--run", str(self.paths.run), child_process.PULSE_OPTION, str(self._pulse_s)]

    # -- running processes -------------------------------------------------------------------

    def broadcast(self, message: ToWorker) -> None:
        for slot in self.slots:
            slot.send(message)

    def wake_on(self, follower: Follower) -> None:
        """End each `turn` early if the logs of a follower have changed."""
        if follower.fileno() >= 0:  # The caller of `turn` reads the logs.
            self._listen(follower.fileno(), follower.drain)

    def sleep_on(self, follower: Follower) -> None:
        """Undo `wake_on`."""
        self._unlisten(follower.fileno())

    def turn(self, timeout_s: float) -> News:
        """Wait at most ``timeout_s`` until a child sends a message or ends.

        Return a child's last messages before its end or together with its end.
        """
        for pipe in (self._line, *(slot.pipe for slot in self.slots)):
            if pipe is not None:
                pipe.flush()  # Send messages for which the buffer of a busy process had no room.
        self._news = News()
        for key, _ in self._selector.select(timeout_s):
            handler: Callable[[], None] = key.data
            if self._selector.get_map().get(key.fd) is key:  # A handler may remove other keys.
                handler()
        return self._news

    def silent(self) -> list[int | None]:
        """Return the ranks that have sent no pulse for `silence_s`; None means the master."""
        return self._watch.silent()

    def name(self, rank: int | None) -> str:
        return MASTER if rank is None else self._slot(rank).name

    @property
    def master_runs(self) -> bool:
        return self.master is not None and self.master.ended() is None

    def all_ended(self) -> bool:
        return not self.master_runs and not any(slot.running for slot in self.slots)

    # -- messages of workers ------------------------------------------------------------------

    def _hear_worker(self, slot: Slot, pipe: Connection) -> None:
        received = pipe.receive_available()
        if received:
            self._watch.heard(slot.rank)
        for values in received:
            self._take(slot, FROM_WORKER.from_json(values))
        if pipe.closed:
            self._unlisten(pipe.fileno())

    def _take(self, slot: Slot, message: Answer | Failure | Pulse) -> None:
        if isinstance(message, Failure):
            self._news.failures.append(message)
        elif not isinstance(message, Pulse):
            self._news.received.append(message)
        elif message.doing is not None:
            self._doing[slot.rank] = message.doing, time.monotonic()

    def _hear_fork_server(self) -> None:
        line = self._line
        assert line is not None
        for values in line.receive_available():
            message = FROM_FORK_SERVER.from_json(values)
            if isinstance(message, ImportFailed):
                self._import_error = message.reason
            else:
                self._worker_ended(message)
        if line.closed:
            self._unlisten(line.fileno())

    def _worker_ended(self, message: WorkerEnded) -> None:
        slot = self._slot(message.rank)
        if self._end(slot):
            self._news.ended.append(Ended(slot.name, message.code, slot.rank))

    def _fork_server_ended(self) -> None:
        """Handle the end of the fork server, which also ends all its workers."""
        assert self.fork_server is not None
        code = self.fork_server.process.wait()
        self._hear_fork_server()  # Read the server's last messages.
        ended = [self._end(slot) for slot in self.slots]
        if any(ended):
            self._news.ended.append(Ended(self.fork_server.name, code, None, self._import_error))
        self._drop_fork_server()

    def _end(self, slot: Slot) -> bool:
        """Receive an ended worker's last messages. Return False if its end was already known."""
        if not slot.running:
            return False
        slot.running = False
        if slot.pipe is not None:
            self._hear_worker(slot, slot.pipe)
        self._forget(slot.rank)
        return True

    def _hear_master(self, pipe: Connection) -> None:
        if pipe.receive_available():
            self._watch.heard(None)
        if pipe.closed:
            self._unlisten(pipe.fileno())

    def _master_ended(self, master: child_process.Child) -> None:
        self._unlisten(master.pidfd)
        self._watch.forget(None)
        self._news.ended.append(Ended(master.name, master.process.wait(), None))

    def _forget(self, rank: int) -> None:
        self._watch.forget(rank)
        self._doing.pop(rank, None)

    # -- activity ---------------------------------------------------------------------------

    def doing(self) -> list[RankProgress]:
        """Return the last reported activity of each rank."""
        now = time.monotonic()
        rows = []
        for _, (doing, heard_at) in sorted(self._doing.items()):
            ago_s = now - heard_at
            silent_s = ago_s if ago_s > MISSED_PULSES * self._pulse_s else 0.0
            rows.append(replace(doing, since_s=doing.since_s + ago_s, silent_s=silent_s))
        return rows

    def witnesses(self) -> list[int | None]:
        """Return the ranks that can write their stacks; None means the master."""
        ranks: list[int | None] = [slot.rank for slot in self.slots if slot.running]
        return [*ranks, None] if self.master_runs else ranks

    def ask_stacks(self, rank: int | None) -> None:
        """Ask a process to write its stacks to the file of `stacks_fd`."""
        if rank is None:
            signal.pidfd_send_signal(self._child(None).pidfd, child_process.STACKS_SIGNAL)
        elif self._line is not None and self._slot(rank).running:
            self._line.send(TO_FORK_SERVER.to_json(WriteStacks(rank=rank)))

    def stacks_fd(self, rank: int | None) -> int:
        descriptor = self._child(None).stacks_fd if rank is None else self._slot(rank).stacks_fd
        assert descriptor is not None
        return descriptor

    def find_pid(self, rank: int | None) -> int | None:
        """Return the pid of a process on this host, even if it runs in a container."""
        pid = self._child(rank).process.pid
        return pid if rank is None else child_process.find_descendant(pid, f"rank {rank}")

    def _child(self, rank: int | None) -> child_process.Child:
        """Return the master's process, or the fork server's process for a rank."""
        child = self.master if rank is None else self.fork_server
        assert child is not None
        return child

    def _slot(self, rank: int) -> Slot:
        return self.slots[rank - self.first_rank]

    # -- ending ------------------------------------------------------------------------------

    def end(self, *, grace_s: float = 0.0, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Kill all workers at once, and the master if it still runs after ``grace_s``.

        Kill the fork server only if it does not answer. Call ``meanwhile`` repeatedly during the
        wait.
        """
        for slot in self.slots:
            if slot.running and self._line is not None:
                self._line.send(TO_FORK_SERVER.to_json(Kill(rank=slot.rank)))
        began = time.monotonic()
        while not self.all_ended() and (passed_s := time.monotonic() - began) < END_TIMEOUT_S:
            if self.master is not None and passed_s >= grace_s:
                self.master.kill()
            meanwhile()
            self.turn(0.05)
        self._await_exits(meanwhile)
        for slot in self.slots:
            self._drop_worker(slot)
        if any(slot.running for slot in self.slots):
            self._drop_fork_server()
        self._drop_master()

    def _await_exits(self, meanwhile: Callable[[], None]) -> None:
        """Kill remaining workers directly, in case the fork server does not answer.

        Wait until these workers have exited and freed their GPUs.
        """
        exits = [
            exit_fd
            for slot in self.slots
            if slot.running and (exit_fd := self._kill_directly(slot.rank)) is not None
        ]
        self._turn_until(lambda: not child_process.running(exits), RELEASE_S, meanwhile)
        self._turn_until(self.all_ended, REPORT_S, meanwhile)
        if late := len(child_process.running(exits)):
            logger.error("%d workers have not ended %.0f s after KILL", late, RELEASE_S)
        for exit_fd in exits:
            os.close(exit_fd)

    def _kill_directly(self, rank: int) -> int | None:
        return child_process.kill_descendant(self._child(rank).process.pid, f"rank {rank}")

    def _turn_until(
        self, done: Callable[[], bool], timeout_s: float, meanwhile: Callable[[], None]
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not done() and time.monotonic() < deadline:
            meanwhile()
            self.turn(0.05)

    def close(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """End all processes, the workers before the fork server.

        Wait until the workers have released their devices. Call ``meanwhile`` during the wait.
        """
        self.end(meanwhile=meanwhile)
        self._drop_fork_server()
        while self.slots:
            os.close(self.slots.pop().stacks_fd)
        self._selector.close()

    def _drop_worker(self, slot: Slot) -> None:
        if slot.pipe is not None:
            self._unlisten(slot.pipe.fileno())
            slot.pipe.close()
            slot.pipe = None
        self._forget(slot.rank)

    def _drop_fork_server(self) -> None:
        """Kill the fork server, if it still runs, together with all workers."""
        for slot in self.slots:
            self._drop_worker(slot)
            slot.running = False
        if self.fork_server is not None and self._line is not None:
            self._unlisten(self.fork_server.pidfd)
            self._unlisten(self._line.fileno())
            self._line.close()
            self.fork_server.close()
        self.fork_server = self._line = None

    def _drop_master(self) -> None:
        self._watch.forget(None)
        if self.master is not None and self._master_pipe is not None:
            self._unlisten(self.master.pidfd)
            self._unlisten(self._master_pipe.fileno())
            self._master_pipe.close()
            self.master.close()
        self.master = self._master_pipe = None

    # -- the selector ------------------------------------------------------------------------

    def _listen(self, descriptor: int, handler: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, handler)

    def _unlisten(self, descriptor: int) -> None:
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)
