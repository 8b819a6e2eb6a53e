"""A server on its host: its processes, its starts, its log and a private folder in memory.

The processes start together, end together and are never left behind (`warden.py`). The log shows
the error with which a server ended. SGLang logs a traceback as one message (``[2026-01-02 03:04:05
TP0] Scheduler hit an exception: Traceback …``), vLLM with a prefix on every line
(``(EngineCore pid=7) ERROR 01-02 03:04:05 [core.py:718] ValueError: …``). Both end with tracebacks
of processes that only waited for the failed one.
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
"""Seconds that the processes of a server may take to end after SIGKILL."""


@dataclass(frozen=True, kw_only=True)
class ServerProgram:
    """A server and where it runs."""

    name: str
    """For messages: ``sglang server 0``."""
    command: Sequence[str]
    environment: Mapping[str, str]
    """All environment variables of the server."""
    log: Path
    """File to which the server's output is appended; only the user can read it."""
    more: Callable[[], Sequence[str]] = tuple
    """Function that returns further arguments at each start."""
    events: EventWriter | None = None
    """Gets an event when the server ends."""


class ServerProcess:
    """A running server.

    It and all that it starts end when this object is closed or the process that made it ends,
    however that happens: a warden (`warden.py`) kills them. If the warden itself is killed, the
    kernel kills the server, and ``close`` kills the other processes of its session.
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
        """Return how it ended: ``sglang server 0 ended (SIGKILL)``."""
        code = self._warden.returncode if self._closed else _code(self.pidfd)
        words = "still runs" if code is None else exit_words(code if code <= 128 else 128 - code)
        return f"{self._program.name} ended ({words})"

    def last_words(self) -> ServerLog:
        """Return the end of this start's output. This may wait for a shared directory."""
        return read_end(self._program.log, self._begin)

    def close(self) -> None:
        """End the server with all of its processes."""
        if self._closed:
            return
        assert self._warden.stdin is not None
        self._warden.stdin.close()
        ended = select.select([self.pidfd], [], [], ENDING_S)[0]
        # not reaped yet, so no other session has its number
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
    """Description of an ended start."""

    reason: str
    served_s: float = 0.0
    """Seconds for which the server was ready."""
    asked: bool = False
    """Whether it got requests."""
    answered: bool = False
    """Whether it has answered a request."""
    error: str = ""
    """Error in its log if the server ended by itself, in words that are equal for each start; empty
    if a server on another host may not have this error."""

    def good(self, stable_s: float) -> bool:
        """Return whether the server was ready for ``stable_s``, and answered if it had requests."""
        return self.served_s >= stable_s and (self.answered or not self.asked)


class FailedStarts:
    """Counts starts that failed in a row."""

    def __init__(self, stable_s: float) -> None:
        """``stable_s`` are the seconds of readiness after which a start counts as good."""
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
        """Whether the server is not to be started again now."""
        return self.hopeless or self.count >= MOST_FAILED_STARTS

    @property
    def hopeless(self) -> bool:
        """Whether another start would probably end with the same error as the last starts.

        They all ended with the same error before they answered a request.
        """
        return self._alike >= MOST_FAILED_STARTS

    def explained(self, name: str, reason: str) -> SlurmrlError:
        """Return why there is no further start; ``reason`` is why the last one ended."""
        if self.hopeless:
            return UsageError(
                f"{name} cannot be used: its last {MOST_FAILED_STARTS} starts have ended with the "
                f"same error, before they answered a request: {reason}"
            )
        return RunFailedError(f"{name} failed {self.count} times in a row: {reason}")


TAIL_BYTES: Final = 256 * 1024
"""Bytes that are read at the end of a log, enough for tracebacks of several ranks."""
LAST_LINES: Final = 5
MOST_CHARACTERS: Final = 500
"""Maximum number of characters of an error in a message."""
TRACEBACK: Final = "Traceback (most recent call last):"
_PREFIX: Final = re.compile(
    r"(\([\w+.-]+ pid=\d+\) ?)?"
    r"((DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:.]+ \[[^\]]*\] ?"
    r"|\[\d{4}-\d\d-\d\d[^\]]*\] )?"
)
"""Beginning of a line of vLLM's or SGLang's log."""
_TOLERATED: Final = re.compile(
    r"(\([\w+.-]+ pid=\d+\) ?)?(DEBUG|INFO|WARNING) \d\d-\d\d "
    r"|\[\d{4}-\d\d-\d\d[^\]]*\] \[http_server\] Error: "
)
"""Log lines of errors that a server survives: vLLM's warnings, with their tracebacks, and requests
that SGLang has rejected."""
_RAISED: Final = re.compile(r"(?=\S*[a-z])[A-Za-z_][\w.]*(: .*)?$")
"""The last line of a traceback."""
_ERROR: Final = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|\b[Ee]rror: ")
_CONSEQUENCE: Final = re.compile(
    r"root cause|EngineDeadError|scheduler is dead"
    r"|^(\w+\.)*(EOFError|BrokenPipeError|CancelledError|KeyboardInterrupt|SystemExit)\b"
)
"""Errors of processes that have lost another one."""
_OF_THE_HOST: Final = re.compile(
    r"^(\w+\.)*(OSError|IOError|MemoryError|TimeoutError|\w+NotFoundError|PermissionError"
    r"|Connection\w*Error|Dist\w+Error)\b"
    r"|\[Errno \d+\]|No space left|Cannot allocate memory|cannot open shared object file"
)
_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class ServerLog:
    """The end of a log, from its position ``begin`` on."""

    path: Path
    lines: tuple[str, ...] = ()
    """The last lines that are not empty."""
    error: str = ""
    """Error of the last traceback, or the last line about an error; empty if there is none."""

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

    This start of the server has written everything after ``begin`` bytes. A log that cannot be read
    counts as empty.
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
    """Return the error of the last traceback, or without a traceback the last line about an error.

    An error of a process that has lost another process is used only if there are no other errors.
    """
    lines = [line for line in lines if not _TOLERATED.match(line)]
    raised = list(_raised([_PREFIX.sub("", line.rstrip(), count=1) for line in lines]))
    causes = [error for error in raised if not _CONSEQUENCE.search(error)]
    if raised:
        return (causes or raised)[-1][:MOST_CHARACTERS]
    told = (line.strip() for line in reversed(lines) if _ERROR.search(line))
    return next(told, "")[:MOST_CHARACTERS]


def _raised(lines: Sequence[str]) -> Iterator[str]:
    """Return the error of each traceback, with the indented lines of its message."""
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
"""Maximum wait for other processes of this user that make or remove folders."""


class HostFolder:
    """A new folder with mode 0700 that is locked until this process exits.

    A killed process leaves its folder. `remove_unused` removes it, and so does the next process of
    this user that makes a folder on the host. All are in one folder of the user, which has another
    name if someone else uses the known name.
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

    The next process that makes a folder removes files that cannot be removed now, for example
    because another process keeps the lock.
    """
    with suppress(OSError):
        for parent in _parents(root):
            with suppress(BlockingIOError), (parent / "lock").open("w") as lock:
                _wait_for(lock)
                _remove_unlocked(parent)


def _wait_for(lock: IO[str]) -> None:
    """Lock a file. Raises BlockingIOError if another process holds it for `LOCK_S`."""
    latest = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= latest:
                raise
        time.sleep(0.02)


def _parents(root: Path) -> Iterator[Path]:
    """Yield the folders of this user that no other user can change, the known name first."""
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
        if known in _parents(root):  # another process of this user was faster
            return known
        chosen = Path(tempfile.mkdtemp(prefix=f"{known.name}.", dir=root))
        message = "using %s, because %s is not your own folder with mode 0700"
        logger.warning(message, chosen, known)
        return chosen
    return known


def _known_name() -> str:
    return f"slurmrl-{os.getuid()}"


def _remove_unlocked(parent: Path) -> None:
    """Remove unlocked folders; the caller has the lock of ``parent``."""
    for folder in parent.iterdir():
        if not folder.is_dir():
            continue
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # the process that made it has removed it
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # the process that made it is alive
        else:
            _remove(folder)
        finally:
            os.close(descriptor)


def _remove(folder: Path) -> None:
    """Remove a folder, and the files of its servers in shared memory."""
    for place, _, names in os.walk(folder):  # other processes may be removing the folder too
        if LIST in names:
            remove_shared(os.path.join(place, LIST))
    shutil.rmtree(folder, ignore_errors=True)
