"""Child processes that cannot outlive their parent, and are only ended by it.

Children ignore the signals that Slurm sends to whole steps (their agent decides what those
mean), get SIGKILL from the kernel when the parent dies, and see end of file on their pipe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from slurmrl.channel.pipe import Connection
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio.atomic import make_private_directory
from slurmrl.fsio.calls import REAL
from slurmrl.fsio.failures import explain
from slurmrl.fsio.primitives import make_private

IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
PIPE_FD_OPTION = "--pipe-fd"
_PR_SET_PDEATHSIG = 1


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send ``number`` to this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


class Child:
    """A child process of this one."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)

    def ended(self) -> int | None:
        """Exit code, negative for a signal, or None while it runs."""
        return self.process.poll()

    def ending(self) -> str:
        """How it ended, in words."""
        code = self.process.returncode
        if code is not None and code < 0:
            return f"{self.name} was ended by {signal.Signals(-code).name}"
        return f"{self.name} exited with code {code}"

    def close(self) -> None:
        """End it if it still runs."""
        if self.ended() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.pidfd)


def spawn(
    name: str,
    module: str,
    arguments: Sequence[str],
    *,
    output: IO[bytes],
    environment: Mapping[str, str],
    prefix: Sequence[str] = (),
    descriptors: Sequence[int] = (),
) -> Child:
    """Start ``python -P -m module arguments`` with its output in ``output``.

    ``prefix`` goes before the interpreter (a container's command); ``descriptors`` stay open.
    Raises EnvironmentFailure where the command cannot be executed.
    """
    parent = os.getpid()
    command = [*prefix, sys.executable, "-P", "-m", module, *arguments]

    def before_exec() -> None:
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        die_with(parent)

    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            pass_fds=descriptors,
            preexec_fn=before_exec,
        )
    except OSError as error:
        raise EnvironmentFailure(
            f"cannot start {name} by '{command[0]}': {error.strerror}"
        ) from error
    return Child(name, process)


def spawn_with_pipe(
    name: str,
    module: str,
    arguments: Sequence[str],
    *,
    output: IO[bytes],
    environment: Mapping[str, str],
    prefix: Sequence[str] = (),
) -> tuple[Child, Connection]:
    """The same with a pipe, whose other end the child finds behind ``--pipe-fd``."""
    ours, theirs = socket.socketpair()
    with theirs:
        child = spawn(
            name,
            module,
            [*arguments, PIPE_FD_OPTION, str(theirs.fileno())],
            output=output,
            environment=environment,
            prefix=prefix,
            descriptors=[theirs.fileno()],
        )
    return child, Connection(ours)


def open_log(path: Path) -> IO[bytes]:
    """Open a log file for appending, readable by its owner only. Raises EnvironmentFailure."""
    make_private_directory(path.parent)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    try:
        descriptor = REAL.open(path, flags)
        make_private(descriptor, REAL)
    except OSError as error:
        raise explain(error, "open", path) from error
    return os.fdopen(descriptor, "ab", 0)
