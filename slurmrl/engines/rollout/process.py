"""The processes of a server: started together, ended together, and never left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurmrl import log, package
from slurmrl.engines.rollout.server_log import ServerLog, read_end
from slurmrl.fsio.atomic import open_log
from slurmrl.monitor.events import EventWriter
from slurmrl.monitor.words import exit_words

logger = log.get(__name__)

WARDEN = package.program("engines/rollout/warden.py")
ENDING_S = 10.0
"""How long the processes of a server may take to end after SIGKILL."""


@dataclass(frozen=True, kw_only=True)
class ServerProgram:
    """A server and where it runs."""

    name: str
    """For messages: ``sglang server 0``."""
    command: Sequence[str]
    environment: Mapping[str, str]
    """All of its variables."""
    log: Path
    """Its output is appended to this file, which only the user can read."""
    more: Callable[[], Sequence[str]] = tuple
    """Further arguments, made at each start."""
    events: EventWriter | None = None
    """Gets an event when the server ends."""


class ServerProcess:
    """A running server.

    It and all that it starts end when this object is closed or the process that made it ends,
    however that happens: a warden (`warden.py`) kills them. If the warden is killed itself, the
    kernel kills the server, and ``close`` the rest of its session.
    """

    def __init__(self, program: ServerProgram) -> None:
        """Raises EnvironmentFailure if the log cannot be written or the program not executed."""
        self._program = program
        with open_log(program.log) as output:
            self._begin = output.seek(0, os.SEEK_END)
            self._warden = subprocess.Popen(
                [sys.executable, "-I", str(WARDEN), *program.command, *program.more()],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(program.environment),
                start_new_session=True,
            )
        self.pidfd = os.pidfd_open(self._warden.pid)
        """Readable once the server has ended."""
        self._closed = False

    @property
    def ended(self) -> bool:
        return self._closed or bool(select.select([self.pidfd], [], [], 0)[0])

    def ending(self) -> str:
        """How it ended: ``sglang server 0 ended (SIGKILL)``."""
        code = self._warden.returncode if self._closed else _code(self.pidfd)
        words = "still runs" if code is None else exit_words(code if code <= 128 else 128 - code)
        return f"{self._program.name} ended ({words})"

    def last_words(self) -> ServerLog:
        """The end of this start's output. It may wait for a shared directory."""
        return read_end(self._program.log, self._begin)

    def close(self) -> None:
        """End the server with all of its processes."""
        if self._closed:
            return
        assert self._warden.stdin is not None
        self._warden.stdin.close()
        ended = select.select([self.pidfd], [], [], ENDING_S)[0]
        # not reaped yet, so the session's number is still its own
        with suppress(ProcessLookupError):
            os.killpg(self._warden.pid, signal.SIGKILL)
        if not ended:
            logger.error(
                "%s: processes have not ended %g s after SIGKILL", self._program.name, ENDING_S
            )
        self._warden.wait()
        os.close(self.pidfd)
        self._closed = True


def _code(pidfd: int) -> int | None:
    """The exit code of an ended child, which stays to be reaped; None while it runs."""
    result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if result is None:
        return None
    status = int(result.si_status)
    return status if result.si_code == os.CLD_EXITED else -status
