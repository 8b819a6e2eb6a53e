"""Child processes that run one command within a time limit or answer a request.

The caller waits for the child. A child leads its own process group, which the caller kills
afterwards. The kernel kills the child when the caller ends. The child starts with no signal
blocked.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

PR_SET_PDEATHSIG: Final = 1
KILLED_S: Final = 5.0
"""Seconds to wait for a killed child. A child may hang longer in a call to a dead file system."""
TAIL_BYTES: Final = 4096
"""Number of bytes to keep from the end of a child's standard error."""


@dataclass(frozen=True)
class ChildEnd:
    """Exit code and output of a child process that has ended."""

    code: int | None
    """The exit code, negative for a signal; None for a child that was killed at its limit."""
    errors: str = ""
    """The end of the child's standard error; empty if the errors were shown."""
    output: bytes = b""
    """The first bytes of the child's standard output: at most ``kept_bytes`` (see `run`)."""

    @property
    def last_line(self) -> str:
        """The last line of the child's standard error; empty without output."""
        return self.errors.splitlines()[-1] if self.errors else ""


def run(
    command: Sequence[str],
    limit_s: float,
    *,
    shown: bool = False,
    env: Mapping[str, str] | None = None,
    kept_bytes: int = 0,
    sent: bytes = b"",
) -> ChildEnd:
    """Run a command with the input ``sent``, which other users cannot read.

    Keep the first ``kept_bytes`` of its standard output. With ``shown``, its standard error goes to
    the standard error of this process. Kill the command after ``limit_s`` seconds.

    Raises OSError for a command that cannot be executed.
    """
    with ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile()) if kept_bytes else None
        errors = None if shown else stack.enter_context(tempfile.TemporaryFile())
        stdin = _filled(stack.enter_context(tempfile.TemporaryFile()), sent)
        process = stack.enter_context(
            _started(
                command,
                stdin=stdin,
                stdout=output or subprocess.DEVNULL,
                stderr=errors,
                env=env,
            )
        )
        code = _exit_code(process, limit_s)
        if output is not None:
            output.seek(0)
        return ChildEnd(code, _tail(errors), output.read(kept_bytes) if output else b"")


class ChildRequest:
    """A request to a module that calls `answer`.

    Iterating starts the child and yields its replies as they come; `ended` is set afterwards.

    Iterating raises OSError if no process can be started.
    """

    def __init__(
        self,
        module: str,
        request: Mapping[str, Any],
        *,
        limit_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        shown: bool = False,
    ) -> None:
        """Prepare the request; ``limit_s`` is in seconds, None for no limit.

        With ``shown``, other output of the child goes to the standard error of this process.
        """
        self.ended = ChildEnd(None)
        self._command = [sys.executable, "-P", "-m", module]
        self._request = json.dumps(request).encode()
        self._limit_s = limit_s
        self._env = env
        self._cwd = cwd
        self._shown = shown

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with ExitStack() as stack:
            # The request is in a file, because a write to a pipe could block.
            stdin = _filled(stack.enter_context(tempfile.TemporaryFile()), self._request)
            errors = None if self._shown else stack.enter_context(tempfile.TemporaryFile())
            process = stack.enter_context(
                _started(
                    self._command,
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=self._env,
                    cwd=self._cwd,
                )
            )
            end = None if self._limit_s is None else time.monotonic() + self._limit_s
            assert process.stdout is not None
            for line in _lines(stack.enter_context(process.stdout), end):
                if (reply := _reply(line)) is not None:
                    yield reply
            left = None if end is None else max(end - time.monotonic(), 0)
            self.ended = ChildEnd(_exit_code(process, left), _tail(errors))

    def last(self) -> dict[str, Any]:
        """Return the last reply; an empty mapping if there was none."""
        return next(reversed(list(self)), {})


def answer(replies: Callable[[Mapping[str, Any]], Iterable[Mapping[str, Any]]]) -> None:
    """Answer the `ChildRequest` that started this process.

    All other output of this process and its children goes to standard error.
    """
    request = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)
        for reply in replies(request):
            output.write(json.dumps(reply) + "\n")
            output.flush()


@contextmanager
def _started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a child with these options of Popen; kill its process group when the block ends."""
    process: subprocess.Popen[bytes] = subprocess.Popen(
        command, start_new_session=True, preexec_fn=DieWithParent(), **options
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            _kill_group(process)
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_S)


def _filled(file: IO[bytes], content: bytes) -> IO[bytes]:
    file.write(content)
    file.seek(0)
    return file


class DieWithParent:
    """Make the child end with its parent. Runs between fork and exec: no imports, no open files."""

    def __init__(self) -> None:
        self._parent = os.getpid()
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl

    def __call__(self) -> None:
        self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if os.getppid() != self._parent:
            os._exit(1)


def _lines(pipe: IO[bytes], end: float | None) -> Iterator[bytes]:
    """Yield the complete lines that arrive before the monotonic time ``end``."""
    rest = b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while poll.poll(None if end is None else max(end - time.monotonic(), 0) * 1000):
        data = os.read(pipe.fileno(), 2**16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _reply(line: bytes) -> dict[str, Any] | None:
    """Return a reply; None for a line that the child printed before it called `answer`."""
    try:
        reply = json.loads(line)
    except ValueError:
        return None
    return reply if isinstance(reply, dict) else None


def _exit_code(process: subprocess.Popen[bytes], limit_s: float | None) -> int | None:
    """Wait until a child exits; kill its process group while no other process can get its id.

    Return the exit code, or None after ``limit_s`` seconds.
    """
    exited = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(exited, select.POLLIN)
        if not poll.poll(None if limit_s is None else limit_s * 1000):
            return None
        _kill_group(process)
        return process.wait()
    finally:
        os.close(exited)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _tail(errors: IO[bytes] | None) -> str:
    if errors is None:
        return ""
    errors.seek(max(errors.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
    return errors.read().decode(errors="replace").strip()
