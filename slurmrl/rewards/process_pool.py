"""A pool of processes that answer requests. Hangs and crashes do not affect the caller.

The rewards with processes (math, code, and users' own rewards in ``reward.pool``), rollout tasks
and the Python tool use pools. `end_with_parent`, `take_pipes` and `send` are for the processes.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import IO, Any, NamedTuple

from slurmrl.display.terminal import exit_words
from slurmrl.errors import EnvironmentFailure, UnreadableInputError, UsageError, WorkerDiedError

PR_SET_PDEATHSIG = 1
FIRST_VICTIM = "1000"
Reply = dict[str, Any]
"""The reply of a process."""

ATTEMPTS = 2
"""Number of attempts at a request whose process dies. A request that hangs is not retried."""
MOST_FAILED_STARTS = 3
MOST_PROCESSES = 8
"""Maximum of the default number of processes. Each process needs 50 to 100 MB."""
LOOK_S = 0.5
"""Seconds between two checks whether a call was abandoned."""
START_LIMIT_S = 120.0
READ_BYTES = 1 << 16
ENDING_S = 1.0
"""Seconds to wait for the end of a process that closed its pipe, to report how it ended."""


class Unanswered(NamedTuple):
    """A request without a reply."""

    why: str


@dataclass(frozen=True)
class PoolProgram:
    """The program of a pool's processes.

    A process reads ``setup`` as its first line, if there is one, and writes one line when it is
    ready: ``{"ready": true}`` with facts about itself, or ``{"failed": REASON}`` if the
    configuration is wrong. The process then answers each line with one line. After a reply with
    ``"retire": true``, the pool replaces the process.
    """

    name: str
    """Name in messages."""
    command: Sequence[str]
    """Command. The pid of the starting process is appended as the last argument."""
    setup: Mapping[str, Any] | None = None
    hint: str = ""
    """Advice in the message if a process does not start."""
    modules: Sequence[str] = ()
    """Value of PYTHONPATH. Default: PYTHONPATH of the starting process."""
    most_reply_bytes: int = 1 << 20
    """Maximum size of a reply in bytes. A longer reply counts as a failure of the process."""
    closing_s: float = 0.0
    """Seconds that an idle process gets to exit after the end of its input, before it is killed."""


class PoolProcess:
    """A running process, which handles one request at a time.

    The process leads a session, which is killed as a whole. A pidfd shows when the process ends,
    because its forked children may keep the pipe open.
    """

    def __init__(self, program: PoolProgram) -> None:
        modules = {"PYTHONPATH": os.pathsep.join(program.modules)} if program.modules else {}
        try:
            self._process = subprocess.Popen(
                [*program.command, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **modules},
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentFailure(
                f"cannot start {program.name} with '{program.command[0]}': {error.strerror}"
            ) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        os.set_blocking(self._requests.fileno(), False)
        os.set_blocking(self._replies.fileno(), False)
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._most_bytes = program.most_reply_bytes
        self._unsent = b""
        self._unread = b""
        self.ready = False
        self.request: int | None = None
        """Index of the request in progress."""
        self.deadline = time.monotonic() + START_LIMIT_S
        if program.setup is not None:
            self._unsent = _line(program.setup)

    @property
    def idle(self) -> bool:
        return self.ready and self.request is None

    def ask(self, index: int, request: Mapping[str, Any], timeout_s: float) -> None:
        """Begin to send a request.

        `work` sends the rest of a long request. A process that does not read therefore cannot block
        the caller.
        """
        self.request = index
        self.deadline = time.monotonic() + timeout_s
        self._unsent = _line(request)

    def events(self) -> Iterator[tuple[int, int]]:
        """Yield the descriptors to wait for, each with the selector's events."""
        yield self._pidfd, selectors.EVENT_READ
        yield self._replies.fileno(), selectors.EVENT_READ
        if self._unsent:
            yield self._requests.fileno(), selectors.EVENT_WRITE

    def work(self) -> Reply | None:
        """Send and receive without waiting. Return a message when it is complete.

        :raises WorkerDiedError: the process has ended, or its reply is not a JSON object of bounded
            size.
        """
        ended = self._ended(0.0)
        self._send()
        closed = self._receive()
        line, newline, self._unread = self._unread.rpartition(b"\n")
        if newline:
            return _message(line)
        if ended or closed:
            raise WorkerDiedError(self._ending())
        if len(self._unread) > self._most_bytes:
            raise WorkerDiedError(f"its reply is longer than {self._most_bytes} bytes")
        return None

    def end_input(self) -> None:
        """Tell the process that no more requests come."""
        self._requests.close()

    def close(self, deadline: float = 0.0) -> None:
        """Wait for the process until the deadline; then kill it, its session and descendants."""
        left = list(_descendants(self.pid))
        self._ended(max(deadline - time.monotonic(), 0.0))
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for pidfd in left:
            with suppress(ProcessLookupError, PermissionError):  # run by sudo as another user
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        self._process.wait()
        os.close(self._pidfd)
        self._replies.close()
        self._requests.close()

    def _send(self) -> None:
        if not self._unsent:
            return
        with suppress(BlockingIOError, BrokenPipeError):  # the pidfd shows the end of the process
            self._unsent = self._unsent[os.write(self._requests.fileno(), self._unsent) :]

    def _receive(self) -> bool:
        """Read the available bytes. Return whether the pipe is at its end."""
        try:
            while len(self._unread) <= self._most_bytes:
                data = os.read(self._replies.fileno(), READ_BYTES)
                if not data:
                    return True
                self._unread += data
        except BlockingIOError:
            pass
        return False

    def _ended(self, timeout_s: float) -> bool:
        """Return whether the process has ended. Do not reap it, to keep the id of its session."""
        return bool(select.select([self._pidfd], [], [], timeout_s)[0])

    def _ending(self) -> str:
        if not self._ended(ENDING_S):
            return "its process closed the pipe"
        result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
        assert result is not None, "it has ended"
        code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        return f"its process ended ({exit_words(code)})"


def _descendants(pid: int) -> Iterator[int]:
    """Yield a pidfd of each descendant. No single session contains all descendants."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # The thread or its child has ended.
            for child in map(int, children.read_text().split()):
                yield os.pidfd_open(child)
                yield from _descendants(child)


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _message(line: bytes) -> Reply:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise WorkerDiedError(f"its reply is not a JSON object: {line[:100]!r}")
    return message


class ProcessPool:
    """Processes that are started on first use and replaced when they hang or die.

    :param timeout_s: time limit of one request in seconds.
    :param processes: number of processes; None lets each call choose it.
    """

    def __init__(
        self, program: PoolProgram, timeout_s: float, processes: int | None = None
    ) -> None:
        if not 0 < timeout_s < inf or (processes is not None and processes < 1):
            raise UsageError(f"timeout_s {timeout_s} and processes {processes} must be positive")
        self.facts: Reply = {}
        """Facts that the newest process reported about itself."""
        self._size = processes
        self._timeout_s = timeout_s
        self._program = program
        self._processes: list[PoolProcess] = []
        self._failed_starts = 0

    def ask(
        self,
        requests: Sequence[Mapping[str, Any]],
        *,
        most: int = 1,
        within_s: float = inf,
        abandoned: Callable[[], bool] | None = None,
    ) -> list[Reply | Unanswered]:
        """Return a reply, or `Unanswered`, for each request.

        A request is `Unanswered` if

        - the process took too long or kept dying;
        - the reply did not come within ``within_s`` after the first request was sent;
        - the call was ``abandoned``, which is checked every `LOOK_S`.

        ``most`` is the number of processes if the constructor did not set it.

        :raises EnvironmentFailure: the program cannot be executed.
        :raises WorkerDiedError: processes do not start.
        :raises UsageError: the program reports that the configuration is wrong.
        """
        self._drop_busy()  # an interrupted call may have left requests
        batch = _Requests(requests, within_s)
        while batch.waiting or any(process.request is not None for process in self._processes):
            self._turn(batch, min(self._size or most, len(requests)), LOOK_S if abandoned else inf)
            if time.monotonic() > batch.end:
                batch.waiting.clear()
            if abandoned is not None and abandoned():
                self._drop_busy()
                break
        return batch.replies

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def start(self) -> Reply:
        """Start one process, if there is none, and return `facts`. Raises as `ask` does."""
        while not any(process.ready for process in self._processes):
            self._turn(_Requests((), inf), 1)
        return self.facts

    def close(self) -> None:
        deadline = time.monotonic() + self._program.closing_s
        idle = [process for process in self._processes if process.idle]
        for process in idle:
            process.end_input()
        for process in self._processes:
            process.close(deadline if process in idle else 0.0)
        self._processes = []

    def _turn(self, batch: _Requests, size: int, most_s: float = inf) -> None:
        """Give requests to ``size`` processes and wait for an event, at most for ``most_s``."""
        while len(self._processes) < size:
            self._processes.append(PoolProcess(self._program))
        self._hand_out(batch)
        self._wait(most_s)
        for process in list(self._processes):
            self._work(process, batch)
        for process in [each for each in self._processes if time.monotonic() > each.deadline]:
            over = time.monotonic() > batch.end
            late = batch.too_late if over else f"it took longer than {self._timeout_s:g} s"
            batch.unanswered(process.request, late)
            self._drop(process)

    def _hand_out(self, batch: _Requests) -> None:
        for process in [process for process in self._processes if process.idle]:
            if not batch.waiting:
                return
            now = time.monotonic()
            batch.begin(now)
            index = batch.waiting.popleft()
            process.ask(index, batch.requests[index], min(self._timeout_s, batch.end - now))

    def _wait(self, most_s: float) -> None:
        """Wait until a process can be served, or until the first deadline."""
        busy = [process for process in self._processes if not process.idle]
        if not busy:
            return
        with selectors.DefaultSelector() as selector:
            for process in busy:
                for descriptor, events in process.events():
                    selector.register(descriptor, events)
            left_s = min(process.deadline for process in busy) - time.monotonic()
            selector.select(min(max(left_s, 0.0), most_s))

    def _work(self, process: PoolProcess, batch: _Requests) -> None:
        try:
            message = process.work()
        except WorkerDiedError as error:
            batch.retry(process.request, str(error))
            self._drop(process)
            return
        if message is None:
            return
        process.deadline = inf
        if not process.ready:
            self._started(process, message)
        elif process.request is not None:
            batch.replies[process.request] = message
            process.request = None
        if message.get("retire"):
            self._drop(process)

    def _started(self, process: PoolProcess, message: Reply) -> None:
        if "failed" in message:
            self.close()
            kind = UnreadableInputError if message.get("unreadable") else UsageError
            raise kind(str(message["failed"]))
        process.ready = True
        self.facts = message
        self._failed_starts = 0

    def _drop_busy(self) -> None:
        for process in [process for process in self._processes if process.request is not None]:
            self._drop(process)

    def _drop(self, process: PoolProcess) -> None:
        process.close()
        self._processes.remove(process)
        if not process.ready:
            self._failed_starts += 1
            if self._failed_starts >= MOST_FAILED_STARTS:
                self._failed_starts = 0
                self.close()
                raise WorkerDiedError(
                    f"{self._program.name} failed to start three times in a row"
                    f"{self._program.hint}; its messages are in the worker's log"
                )


class _Requests:
    """The requests of one call and their replies."""

    def __init__(self, requests: Sequence[Mapping[str, Any]], within_s: float) -> None:
        self.requests = requests
        self.waiting = deque(range(len(requests)))
        self.too_late = f"it was not scored within {within_s:g} s"
        self.replies: list[Reply | Unanswered] = [Unanswered(self.too_late)] * len(requests)
        self.end = inf
        """Deadline for all requests."""
        self._attempts = [0] * len(requests)
        self._within_s = within_s

    def begin(self, now: float) -> None:
        self.end = min(self.end, now + self._within_s)

    def retry(self, index: int | None, why: str) -> None:
        """Queue the request of a lost process again, unless this was the request's last attempt."""
        if index is None:
            return
        self._attempts[index] += 1
        self.unanswered(index, why)
        if self._attempts[index] < ATTEMPTS:
            self.waiting.appendleft(index)

    def unanswered(self, index: int | None, why: str) -> None:
        if index is not None:
            self.replies[index] = Unanswered(why)


def end_with_parent() -> None:
    """Let this process die with its parent, and before its parent if memory runs out."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[-1]):
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(FIRST_VICTIM, encoding="ascii")


def take_pipes() -> tuple[IO[bytes], IO[bytes]]:
    """Return the pipes of requests and of replies.

    Standard input becomes empty, and standard output becomes standard error, because the user's
    code may read and print. A forked child closes both pipes, so it cannot answer requests.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    os.register_at_fork(after_in_child=requests.close)
    os.register_at_fork(after_in_child=replies.close)
    return requests, replies


def send(replies: IO[bytes], message: Reply) -> None:
    """Write a message as one line of JSON."""
    replies.write(json.dumps(message).encode() + b"\n")
    replies.flush()
