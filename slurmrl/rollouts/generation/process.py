"""A server on its host: its processes, its failed starts, its log and a private folder in memory.

The processes of a server end together (`warden.py`). The log has the error with which a server
ended. SGLang logs a traceback as one message (``[2026-01-02 03:04:05 TP0] Scheduler hit an
exception: Traceback …``). vLLM logs a traceback with a prefix on every line (``(EngineCore pid=7)
ERROR 01-02 03:04:05 [core.py:718] ValueError: …``). In both logs, the last tracebacks come from
processes that only waited for the failed process.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from slurmrl import log, package
from slurmrl.display.terminal import exit_words
from slurmrl.errors import RunFailedError, SlurmrlError, UsageError
from slurmrl.fsio.atomic import open_log
from slurmrl.fsio.calls import explain
from slurmrl.rollouts.generation.warden import LIST, remove_shared
from slurmrl.run.events import EventWriter
from slurmrl.tensors.parallel.gpu import find_in

logger = log.get(__name__)

WARDEN = package.program("rollouts/generation/warden.py")
ENDING_S = 10.0
"""Seconds to wait for the end of a server's processes after SIGKILL."""


@dataclass(frozen=True, kw_only=True)
class ServerProgram:
    """A server's command, environment and log."""

    name: str
    """Name in messages: ``sglang server 0``."""
    command: Sequence[str]
    environment: Mapping[str, str]
    """All environment variables of the server."""
    log: Path
    """File to which the server's output is appended. Only the user can read the file."""
    more: Callable[[], Sequence[str]] = tuple
    """Function that returns additional arguments of the command at each start."""
    events: EventWriter | None = None
    """Writer of an event for each end of the server."""


class ServerProcess:
    """A running server.

    A warden (`warden.py`) kills the server and all its processes when this object is closed or the
    process that made it ends in any way. If the warden itself is killed, the kernel kills the
    server, and ``close`` kills the other processes of its session.
    """

    def __init__(self, program: ServerProgram) -> None:
        """Start the server. Raises EnvironmentFailure if its log cannot be written."""
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
        """Descriptor that is readable after the server has ended."""
        self._closed = False

    @property
    def ended(self) -> bool:
        return self._closed or bool(select.select([self.pidfd], [], [], 0)[0])

    def ending(self) -> str:
        """Return how the server ended, such as ``sglang server 0 ended (SIGKILL)``."""
        code = self._warden.returncode if self._closed else _code(self.pidfd)
        words = "still runs" if code is None else exit_words(code if code <= 128 else 128 - code)
        return f"{self._program.name} ended ({words})"

    def last_words(self) -> ServerLog:
        """Return the last output of the server. Reading may wait for a shared directory."""
        return read_end(self._program.log, self._begin)

    def close(self) -> None:
        """End the server with all its processes."""
        if self._closed:
            return
        assert self._warden.stdin is not None
        self._warden.stdin.close()
        ended = select.select([self.pidfd], [], [], ENDING_S)[0]
        # The warden is not reaped yet, so the kernel has not reused its id.
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
    """Return the exit code of an ended child without reaping it; None while it runs."""
    result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if result is None:
        return None
    status = int(result.si_status)
    return status if result.si_code == os.CLD_EXITED else -status


MOST_FAILED_STARTS: Final = 3


@dataclass(frozen=True, kw_only=True)
class EndedStart:
    """Facts about one ended start of a server."""

    reason: str
    served_s: float = 0.0
    """Seconds for which the server was ready."""
    asked: bool = False
    """Whether the server got requests."""
    answered: bool = False
    """Whether the server has answered a request."""
    error: str = ""
    """Error in the log of a server that ended by itself. Numbers that differ from start to start
    are omitted. Empty if the error may be specific to this host."""

    def good(self, stable_s: float) -> bool:
        """Return whether the server was ready for ``stable_s`` and answered any requests it got."""
        return self.served_s >= stable_s and (self.answered or not self.asked)


class FailedStarts:
    """Counts failed starts in a row."""

    def __init__(self, stable_s: float) -> None:
        """``stable_s`` is the time in seconds after which a ready server counts as started."""
        self._stable_s = stable_s
        self._error = ""
        self._alike = 0
        self.count = 0

    def add(self, ending: EndedStart) -> None:
        self.count = 1 if ending.good(self._stable_s) else self.count + 1
        same = bool(ending.error) and not ending.answered
        self._alike = self._alike + 1 if same and ending.error == self._error else int(same)
        self._error = ending.error

    @property
    def enough(self) -> bool:
        """Whether the server must not be started again."""
        return self.hopeless or self.count >= MOST_FAILED_STARTS

    @property
    def hopeless(self) -> bool:
        """Whether the last starts ended with the same error before they answered a request.

        Another start would probably end with this error, too.
        """
        return self._alike >= MOST_FAILED_STARTS

    def explained(self, name: str, reason: str) -> SlurmrlError:
        """Return the error for a server that is not started again.

        ``reason`` is the reason why the last start ended.
        """
        if self.hopeless:
            return UsageError(
                f"{name} cannot be used: its last {MOST_FAILED_STARTS} starts have ended with the "
                f"same error, before they answered a request: {reason}"
            )
        return RunFailedError(f"{name} failed {self.count} times in a row: {reason}")


TAIL_BYTES: Final = 256 * 1024
"""Number of bytes that are read at the end of a log: enough for tracebacks of several ranks."""
LAST_LINES: Final = 5
MOST_CHARACTERS: Final = 500
"""Maximum number of characters of an error in a message."""
TRACEBACK: Final = "Traceback (most recent call last):"
_PREFIX: Final = re.compile(
    r"(\([\w+.-]+ pid=\d+\) ?)?"
    r"((DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:.]+ \[[^\]]*\] ?"
    r"|\[\d{4}-\d\d-\d\d[^\]]*\] )?"
)
"""Pattern of the beginning of a line of vLLM's or SGLang's log."""
_TOLERATED: Final = re.compile(
    r"(\([\w+.-]+ pid=\d+\) ?)?(DEBUG|INFO|WARNING) \d\d-\d\d "
    r"|\[\d{4}-\d\d-\d\d[^\]]*\] \[http_server\] Error: "
)
"""Pattern of log lines about errors that a server survives: vLLM's warnings with tracebacks, and
requests that SGLang rejects."""
_RAISED: Final = re.compile(r"(?=\S*[a-z])[A-Za-z_][\w.]*(: .*)?$")
"""Pattern of the last line of a traceback."""
_ERROR: Final = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|\b[Ee]rror: ")
_CONSEQUENCE: Final = re.compile(
    r"root cause|EngineDeadError|scheduler is dead"
    r"|^(\w+\.)*(EOFError|BrokenPipeError|CancelledError|KeyboardInterrupt|SystemExit)\b"
)
"""Pattern of errors of processes that have lost another process."""
_OF_THE_HOST: Final = re.compile(
    r"^(\w+\.)*(OSError|IOError|MemoryError|TimeoutError|\w+NotFoundError|PermissionError"
    r"|Connection\w*Error|Dist\w+Error)\b"
    r"|\[Errno \d+\]|No space left|Cannot allocate memory|cannot open shared object file"
)
_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class ServerLog:
    """The end of a server's log."""

    path: Path
    lines: tuple[str, ...] = ()
    """The last lines that are not empty."""
    error: str = ""
    """Error of the last traceback, or the last line with an error; empty without an error."""

    @property
    def kind(self) -> str:
        """The error without its numbers, which differ from start to start."""
        return _NUMBER.sub("#", self.error)

    @property
    def of_the_host(self) -> bool:
        """Whether the error may be specific to this host."""
        return bool(_OF_THE_HOST.search(self.error)) or find_in(self.error) is not None

    def __str__(self) -> str:
        where = f"its log is {self.path}"
        if self.error:
            return f"{self.error}; {where}"
        return "\n".join([f"{where}, which ends with:", *self.lines]) if self.lines else where


def read_end(path: Path, begin: int) -> ServerLog:
    """Read the end of a log.

    The newest start of the server has written all bytes after the first ``begin`` bytes. A log that
    cannot be read counts as empty.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin, size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ServerLog(path)
    lines = text.splitlines()
    last = tuple(line for line in lines[-LAST_LINES:] if line.strip())
    return ServerLog(path, last, last_error(lines))


def last_error(lines: Sequence[str]) -> str:
    """Return the error of the last traceback; without a traceback, the last line with an error.

    Prefer errors that are not consequences of the loss of another process.
    """
    lines = [line for line in lines if not _TOLERATED.match(line)]
    raised = list(_raised([_PREFIX.sub("", line.rstrip(), count=1) for line in lines]))
    causes = [error for error in raised if not _CONSEQUENCE.search(error)]
    if raised:
        return (causes or raised)[-1][:MOST_CHARACTERS]
    told = (line.strip() for line in reversed(lines) if _ERROR.search(line))
    return next(told, "")[:MOST_CHARACTERS]


def _raised(lines: Sequence[str]) -> Iterator[str]:
    """Yield the error of each traceback, with the indented lines of its message."""
    inside = False
    for index, line in enumerate(lines):
        if line.endswith(TRACEBACK):
            inside = True
        elif inside and _RAISED.match(line):
            inside = False
            yield " ".join([line, *_indented(lines[index + 1 :])])


def _indented(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith(" ") or not line.strip():
            return
        yield line.strip()


ROOT = Path("/dev/shm")
LOCK_S = 30.0
"""Maximum wait in seconds for other processes of this user that make or remove folders."""


class HostFolder:
    """A new folder with mode 0700 that is locked until this process exits.

    A killed process leaves its folder. `remove_unused` or the next process of this user that makes
    a folder on the host removes it. The folders are in one parent folder of the user, which gets a
    different name if someone else uses the usual name.
    """

    def __init__(self, root: Path = ROOT) -> None:
        """Make the folder. Raises EnvironmentFailure if this fails."""
        try:
            parent = next(_parents(root), None) or _new_parent(root)
            with (parent / "lock").open("w") as lock:
                _wait_for(lock)
                _remove_unlocked(parent)
                self.path = Path(tempfile.mkdtemp(dir=parent))
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise explain(error, "make a folder in", root) from error

    def close(self) -> None:
        """Remove the folder."""
        _remove(self.path)
        os.close(self._descriptor)


def remove_unused(root: Path = ROOT) -> None:
    """Remove folders of this user's killed processes.

    Some files cannot be removed now, for example because another process has the lock. The next
    process that makes a folder removes these files.
    """
    with suppress(OSError):
        for parent in _parents(root):
            with suppress(BlockingIOError), (parent / "lock").open("w") as lock:
                _wait_for(lock)
                _remove_unlocked(parent)


def _wait_for(lock: IO[str]) -> None:
    """Lock a file. Raises BlockingIOError if another process holds the lock for `LOCK_S`."""
    latest = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= latest:
                raise
        time.sleep(0.02)


def _parents(root: Path) -> Iterator[Path]:
    """Yield the parent folders that only this user can change, the usual name first."""
    known = root / _known_name()
    for path in (known, *sorted(root.glob(f"{known.name}.*"))):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if mine and not status.st_mode & 0o077:
            yield path


def _new_parent(root: Path) -> Path:
    known = root / _known_name()
    try:
        known.mkdir(mode=0o700)
    except FileExistsError:
        if known in _parents(root):  # Another process made the folder.
            return known
        chosen = Path(tempfile.mkdtemp(prefix=f"{known.name}.", dir=root))
        message = "using %s, because %s is not your own folder with mode 0700"
        logger.warning(message, chosen, known)
        return chosen
    return known


def _known_name() -> str:
    return f"slurmrl-{os.getuid()}"


def _remove_unlocked(parent: Path) -> None:
    """Remove unlocked folders in ``parent``, whose lock the caller has."""
    for folder in parent.iterdir():
        if not folder.is_dir():
            continue
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # The owner removed the folder.
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # The owner still runs.
        else:
            _remove(folder)
        finally:
            os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a folder, and the files that its servers have left in shared memory."""
    for place, _, names in os.walk(folder):  # other processes may be removing the folder too
        if LIST in names:
            remove_shared(os.path.join(place, LIST))
    shutil.rmtree(folder, ignore_errors=True)
