"""One judge: a child process that answers requests, one JSON line each way at a time."""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from slurmrl.display.words import exit_words
from slurmrl.errors import EnvironmentFailure, WorkerDiedError

Verdict = dict[str, Any]
"""A judge's reply."""

START_LIMIT_S = 120.0
READ_BYTES = 1 << 16
ENDING_S = 1.0
"""How long a process may take to end after it closed its pipe, to report how it ended."""


@dataclass(frozen=True)
class JudgeProgram:
    """The program of a pool's judges.

    A judge reads ``setup`` as its first line, if there is one, and writes one line when it is
    ready: ``{"ready": true}`` with facts about itself, or ``{"failed": REASON}`` for a fault of
    the configuration. Then it answers each line with one line. A reply with ``"retire": true`` is
    the last one of this process.
    """

    name: str
    """For messages."""
    command: Sequence[str]
    """The pid of the process that starts it is added."""
    setup: Mapping[str, Any] | None = None
    hint: str = ""
    """Advice in case that it does not start."""
    modules: Sequence[str] = ()
    """Folders from which it imports. Default: those of its environment."""
    most_reply_bytes: int = 1 << 20
    """Longest reply that is read. A longer one comes from a process that is out of control."""
    closing_s: float = 0.0
    """How long an idle judge may take to end after the end of its input, before it is killed."""


class Judge:
    """A running judge, which handles one request at a time.

    It has a session of its own, which is killed as a whole. Its end is noticed by its pidfd: a
    process that it has forked may keep the pipe open.
    """

    def __init__(self, program: JudgeProgram) -> None:
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
        self._pidfd = os.pidfd_open(self._process.pid)
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
    def pid(self) -> int:
        return self._process.pid

    @property
    def idle(self) -> bool:
        return self.ready and self.request is None

    def ask(self, index: int, request: Mapping[str, Any], timeout_s: float) -> None:
        """Begin to send a request. The pipe takes the rest of a long one in `work`, so that a
        judge that does not read cannot block the caller."""
        self.request = index
        self.deadline = time.monotonic() + timeout_s
        self._unsent = _line(request)

    def events(self) -> Iterator[tuple[int, int]]:
        """Descriptors to wait for, each with the selector's events."""
        yield self._pidfd, selectors.EVENT_READ
        yield self._replies.fileno(), selectors.EVENT_READ
        if self._unsent:
            yield self._requests.fileno(), selectors.EVENT_WRITE

    def work(self) -> Verdict | None:
        """Send and receive what is possible without waiting. Return a message once it is whole.

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
        """Tell the process that no further request comes."""
        self._requests.close()

    def close(self, deadline: float = 0.0) -> None:
        """Kill the process with its session once it has ended or the deadline has passed, and reap
        it."""
        self._ended(max(deadline - time.monotonic(), 0.0))
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._pidfd)
        self._replies.close()
        self._requests.close()

    def _send(self) -> None:
        if not self._unsent:
            return
        with suppress(BlockingIOError, BrokenPipeError):  # its end is noticed elsewhere
            self._unsent = self._unsent[os.write(self._requests.fileno(), self._unsent) :]

    def _receive(self) -> bool:
        """Read what there is. Return whether the pipe is at its end."""
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
        """Whether it has ended. It is not reaped, so that its session keeps its number."""
        return bool(select.select([self._pidfd], [], [], timeout_s)[0])

    def _ending(self) -> str:
        if not self._ended(ENDING_S):
            return "its process closed the pipe"
        result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
        assert result is not None, "it has ended"
        code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        return f"its process ended ({exit_words(code)})"


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _message(line: bytes) -> Verdict:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise WorkerDiedError(f"its reply is not a JSON object: {line[:100]!r}")
    return message
