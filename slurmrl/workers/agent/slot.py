"""A rank's slot on a host: its fork server and its worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, TypeAlias

from slurmrl.channel.pipe import Connection
from slurmrl.workers import process
from slurmrl.workers.messages import (
    FROM_FORK_SERVER,
    TO_FORK_SERVER,
    TO_ROLLOUT_WORKER,
    TO_WORKER,
    Fork,
    ImportFailed,
    Kill,
    Order,
    Retire,
    Serve,
    Start,
    StartRollout,
    WriteStacks,
)
from slurmrl.worlds import RankId

ToWorker: TypeAlias = Start | Order | StartRollout | Serve | Retire
"""The last three are for the workers of rollout tasks."""
Launch: TypeAlias = Callable[[str, IO[bytes]], tuple[process.Child, Connection]]
"""(name, output) -> a fork server, and the pipe on which it receives messages."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    name: str
    code: int
    """Exit code, negative for a signal."""
    rank: int | None
    """None for the master."""
    why: str = ""
    """The reason, if the process reported one."""

    def __str__(self) -> str:
        ending = process.ending(self.name, self.code)
        return f"{ending}: {self.why}" if self.why else ending


class Slot:
    def __init__(self, rank: RankId, host: str, launch: Launch) -> None:
        self.rank = rank.rank
        self.name = f"{rank} on {host}"
        self.fork_server: process.Child | None = None
        self.line: Connection | None = None
        """To the fork server."""
        self.pipe: Connection | None = None
        """To the worker."""
        self.running = False
        """Whether a worker was requested and has not ended."""
        self._launch = launch
        self._import_error = ""

    def start_fork_server(self, output: IO[bytes]) -> None:
        """Raises EnvironmentFailure."""
        self._import_error = ""
        self.fork_server, self.line = self._launch(f"the fork server of {self.name}", output)

    def fork(self) -> None:
        """Request a worker from the fork server."""
        assert self.line is not None
        assert not self.running
        self.pipe, theirs = Connection.pair()
        self.line.send_with_fd(TO_FORK_SERVER.to_json(Fork()), theirs.fileno())
        theirs.close()
        self.running = True

    def send(self, message: ToWorker) -> None:
        """Send a message to the worker."""
        assert self.pipe is not None
        if isinstance(message, StartRollout | Serve | Retire):
            self.pipe.send(TO_ROLLOUT_WORKER.to_json(message))
        else:
            self.pipe.send(TO_WORKER.to_json(message))

    def kill(self) -> None:
        """Request that the worker is killed; its end is reported later."""
        if self.running and self.line is not None:
            self.line.send(TO_FORK_SERVER.to_json(Kill()))

    def ask_stacks(self) -> None:
        """Request the worker's stacks."""
        if self.running and self.line is not None:
            self.line.send(TO_FORK_SERVER.to_json(WriteStacks()))

    def flush(self) -> None:
        for pipe in (self.line, self.pipe):
            if pipe is not None:
                pipe.flush()

    def hear_fork_server(self) -> list[Ended]:
        """Return the end of its worker, once."""
        received = self.line.receive_available() if self.line is not None else []
        ended: list[Ended] = []
        for values in received:
            message = FROM_FORK_SERVER.from_json(values)
            if isinstance(message, ImportFailed):
                self._import_error = message.reason
            else:
                ended += self._end(self.name, message.code)
        return ended

    def fork_server_ended(self) -> list[Ended]:
        """Handle its end: its worker has ended with it."""
        assert self.fork_server is not None
        code = self.fork_server.process.wait()
        ended = self.hear_fork_server()  # messages from before its end
        return ended + self._end(self.fork_server.name, code, self._import_error)

    def drop_worker(self) -> None:
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None

    def drop_fork_server(self) -> process.Child | None:
        """Detach the fork server and its worker; the caller closes the returned process."""
        self.drop_worker()
        if self.line is not None:
            self.line.close()
            self.line = None
        fork_server, self.fork_server, self.running = self.fork_server, None, False
        return fork_server

    def _end(self, name: str, code: int, why: str = "") -> list[Ended]:
        was_running, self.running = self.running, False
        return [Ended(name, code, self.rank, why)] if was_running else []
