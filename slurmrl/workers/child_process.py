"""Child processes that cannot outlive their parent, and that only their parent ends.

Children ignore the signals that Slurm sends to whole steps, because their agent handles these
signals. When the parent dies, the kernel sends SIGKILL to its children, and they read end of file
from their pipe. Children drop output that the output file does not accept.

Children send pulses over their pipe. A process sends no pulses while it is stopped or its
interpreter lock is held. A process that waits for other ranks still sends pulses. The master's
deadline limits such waits.

On request, a process writes its stacks, even if it hangs. On SIGQUIT, the interpreter's fault
handler writes the Python stacks of all threads into memory that the process shares with its agent.
The fault handler runs inside the signal handler, so it works while the interpreter lock is held or
a collective never ends. The handler fails only if the process is stopped or blocked in the kernel.
The pulse thread then adds the parts that need Python (torch's flight recorder) and the last line.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import io
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Generic, TypeVar

from typing_extensions import Buffer

from slurmrl import log
from slurmrl.display.terminal import signal_name
from slurmrl.errors import EnvironmentFailure
from slurmrl.run.channel.pipe import Connection
from slurmrl.workers.messages import FROM_WORKER, Pulse

logger = log.get(__name__)

IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
PIPE_FD_OPTION = "--pipe-fd"
PULSE_OPTION = "--pulse-s"
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
KILL_TIMEOUT_S = 10.0
"""Seconds that killed children may take to end. A child that is blocked in the kernel, because a
file system or a GPU does not answer, takes longer."""


def name_process(name: str) -> None:
    """Set the name that ``ps -o comm`` and ``top`` show for this process; at most 15 bytes."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of processes that its children leave behind."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def ignore_signals() -> None:
    """Ignore the signals that Slurm sends to whole steps; the agent handles them.

    Children inherit this setting. Children call this function again, because a container runtime
    such as Apptainer resets the setting.
    """
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)


def allow_tracing() -> None:
    """Let other processes of the user, such as py-spy, read the stacks of this process.

    Otherwise Yama may allow this only to ancestors. Children do not inherit the permission.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send the signal ``number`` to this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def kill_parent() -> None:
    """Kill the process that started this process, even if it is stopped."""
    parent = os.getppid()
    if parent > 1:  # 1 means that the parent has already ended.
        os.kill(parent, signal.SIGKILL)


class Child:
    """A child process of this process."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        self.stacks_fd: int | None = None
        """Descriptor of the file to which the child writes its stacks on request."""

    def ended(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        return self.process.poll()

    def ending(self) -> str:
        """Describe how the child ended."""
        return ending(self.name, self.process.returncode)

    def kill(self) -> None:
        """Kill the child, even if it is stopped."""
        if self.ended() is None:
            self.process.kill()

    def close(self, timeout_s: float = KILL_TIMEOUT_S) -> None:
        """Kill the child if it still runs."""
        close_all([self], timeout_s)


def find_descendant(pid: int, name: str) -> int | None:
    """Return the pid of the descendant of ``pid`` that has this name (see `name_process`)."""
    waiting = [pid]
    while waiting:
        folder = Path("/proc", str(waiting.pop()))
        try:
            children = [
                int(child)
                for task in (folder / "task").iterdir()
                for child in (task / "children").read_text().split()
            ]
            if (folder / "comm").read_text().rstrip("\n") == name:
                return int(folder.name)
        except OSError:  # The process has ended, or this kernel lacks lists of children.
            continue
        waiting += children
    return None


def kill_descendant(pid: int, name: str) -> int | None:
    """Send SIGKILL to the descendant of ``pid`` that has this name.

    Return a descriptor that is readable when the process has ended and its memory and devices are
    freed; None if there is no such process.
    """
    descendant = find_descendant(pid, name)
    if descendant is None:
        return None
    try:
        pidfd = os.pidfd_open(descendant)
    except ProcessLookupError:
        return None
    if find_descendant(pid, name) == descendant:  # The kernel may have reused the pid.
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    return pidfd


def running(pidfds: Sequence[int]) -> list[int]:
    """Return the descriptors whose processes have not ended."""
    ended = select.select(pidfds, [], [], 0)[0]
    return [pidfd for pidfd in pidfds if pidfd not in ended]


def ending(name: str, code: int | None) -> str:
    """Describe how a process ended. ``code`` is negative for a signal."""
    if code is not None and code < 0:
        return f"{name} was ended by {signal_name(-code)}"
    return f"{name} exited with code {code}"


def close_all(children: Iterable[Child], timeout_s: float = KILL_TIMEOUT_S) -> None:
    """Kill children together. Wait at most ``timeout_s`` seconds until all have ended."""
    closed = list(children)
    for child in closed:
        child.kill()
    deadline = time.monotonic() + timeout_s
    for child in closed:
        try:
            child.process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            logger.error("%s was killed but has not ended after %g s", child.name, timeout_s)
        os.close(child.pidfd)
        if child.stacks_fd is not None:
            os.close(child.stacks_fd)


def spawn(
    name: str,
    module: str,
    arguments: Sequence[str],
    *,
    output: IO[bytes],
    environment: Mapping[str, str],
    interpreter: Sequence[str] = (sys.executable,),
    descriptors: Sequence[int] = (),
) -> Child:
    """Start ``python -P -m module arguments`` and redirect the output to ``output``.

    ``interpreter`` may begin with a container's command. The child inherits ``descriptors``. Raises
    EnvironmentFailure if the command cannot be executed.
    """
    parent = os.getpid()
    command = [*interpreter, "-P", "-m", module, *arguments]

    def before_exec() -> None:
        ignore_signals()
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # The child sets a handler later.
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
            f"cannot start {name} with '{command[0]}': {error.strerror}"
        ) from error
    return Child(name, process)


def spawn_with_pipe(
    name: str,
    module: str,
    arguments: Sequence[str],
    *,
    output: IO[bytes],
    environment: Mapping[str, str],
    interpreter: Sequence[str] = (sys.executable,),
) -> tuple[Child, Connection]:
    """Start a process as `spawn` does, with a pipe and a file for its stacks.

    Return the child and this end of the pipe. ``--pipe-fd`` names the child's end.
    """
    ours, theirs = Connection.pair()
    stacks_fd = new_stacks_file()
    given = [PIPE_FD_OPTION, str(theirs.fileno()), STACKS_OPTION, str(stacks_fd)]
    try:
        child = spawn(
            name,
            module,
            [*arguments, *given],
            output=output,
            environment=environment,
            interpreter=interpreter,
            descriptors=[theirs.fileno(), stacks_fd],
        )
    except EnvironmentFailure:
        ours.close()
        os.close(stacks_fd)
        raise
    finally:
        theirs.close()
    child.stacks_fd = stacks_fd
    return child, ours


class _Forgiving(io.FileIO):
    """File that drops output during errors (full disk, unreachable server).

    Once the file accepts output again, it notes the number of dropped bytes.
    """

    _dropped = 0
    _why = ""

    def write(self, data: Buffer, /) -> int:
        size = memoryview(data).nbytes
        try:
            if self._dropped:
                super().write(
                    f"\n--- slurmrl: {self._dropped} bytes of output were dropped: {self._why} "
                    "---\n".encode()
                )
                self._dropped = 0
            return super().write(data)
        except OSError as error:
            self._dropped += size
            self._why = error.strerror or str(error)
            return size


def drop_failed_output() -> None:
    """Replace sys.stdout and sys.stderr of this process, so that printing raises no OSError."""
    sys.stdout.flush()
    sys.stderr.flush()
    sys.stdout = _forgiving(1, line_buffering=False)
    sys.stderr = _forgiving(2, line_buffering=True)


def _forgiving(descriptor: int, *, line_buffering: bool) -> io.TextIOWrapper:
    raw = _Forgiving(descriptor, "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors="replace", line_buffering=line_buffering
    )


STACKS_SIGNAL = signal.SIGQUIT
STACKS_OPTION = "--stacks-fd"
LAST_LINE = "(end)\n"


def new_stacks_file() -> int:
    """Return the descriptor of a file in memory to which several processes can append."""
    descriptor = os.memfd_create("stacks")
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_APPEND)
    return descriptor


def write_stacks_on_signal(descriptor: int) -> None:
    """Let this process and its forks write their stacks on SIGQUIT. Call it in the main thread.

    The fault handler then calls Python's signal handler, which makes `stacks_wakeup` readable.
    """
    signal.signal(STACKS_SIGNAL, _ignore)
    signal.siginterrupt(STACKS_SIGNAL, False)
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True, chain=True)


def stacks_wakeup() -> int:
    """Return a descriptor that is readable after each signal, even while Python code is blocked."""
    ours, theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    return ours


def finish_stacks(descriptor: int, text: str) -> None:
    """Append ``text``, which only a running interpreter can provide, and the end marker."""
    os.write(descriptor, (text + LAST_LINE).encode())


def take_stacks(descriptor: int, most_bytes: int) -> tuple[str, bool]:
    """Return the stacks that a process has written, and whether they are complete.

    Cut the stacks after ``most_bytes``.
    """
    data = os.pread(descriptor, most_bytes, 0)
    size = os.fstat(descriptor).st_size
    text = data.decode(errors="replace")
    if size > most_bytes:
        return f"{text}\n({size - most_bytes} more bytes omitted)\n", True
    return text.removesuffix(LAST_LINE), text.endswith(LAST_LINE)


def own_stacks(most_bytes: int) -> str:
    """Return the stacks of all threads of this process, at most ``most_bytes``."""
    descriptor = new_stacks_file()
    try:
        faulthandler.dump_traceback(descriptor, all_threads=True)
        return take_stacks(descriptor, most_bytes)[0]
    finally:
        os.close(descriptor)


def clear_stacks(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: the fault handler has written the stacks."""


K = TypeVar("K", bound=Hashable)

CHUNK_BYTES = 4096
PULSES_PER_SILENCE = 4
GAPS_PER_SILENCE = 4
"""Divisor of the silence limit. The time between two checks counts as at most this fraction of the
limit, because a suspended agent could not receive pulses in between."""


def pulse_interval_s(heartbeat_s: float, silence_s: float) -> float:
    """Return the interval between two pulses, a fraction of ``silence_s``."""
    return min(heartbeat_s, silence_s / PULSES_PER_SILENCE)


@dataclass(frozen=True)
class Errand:
    """A second task of the pulse thread: call ``run`` whenever ``wakeup`` is readable."""

    wakeup: int
    run: Callable[[], None]


def start_pulse(
    pipe: Connection,
    every_s: float,
    describe: Callable[[], Pulse] = Pulse,
    errand: Errand | None = None,
) -> None:
    """Send a pulse at once and then every ``every_s`` seconds, from a thread.

    The thread ends with the process or the pipe. It sends no pulse while the pipe still holds
    unread messages, because these also show that the process is alive.
    """

    def beat() -> None:
        while not pipe.closed:
            if pipe.flush():
                pipe.send(FROM_WORKER.to_json(describe()))
            if errand is None:
                time.sleep(every_s)
            elif select.select([errand.wakeup], [], [], every_s)[0]:
                os.read(errand.wakeup, CHUNK_BYTES)
                errand.run()

    threading.Thread(target=beat, name="pulse", daemon=True).start()


class SilenceWatch(Generic[K]):
    """Tracks how long each of several processes has been silent.

    The time before the first sign of life of a process does not count.
    """

    def __init__(self, silence_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._silence_s = silence_s
        self._clock = clock
        self._looked_at = clock()
        self._ages: dict[K, float] = {}

    def heard(self, key: K) -> None:
        self._ages[key] = 0.0

    def forget(self, key: K) -> None:
        self._ages.pop(key, None)

    def silent(self) -> list[K]:
        """Return the keys of processes that have been silent for too long."""
        now = self._clock()
        passed_s = min(now - self._looked_at, self._silence_s / GAPS_PER_SILENCE)
        self._looked_at = now
        for key in self._ages:
            self._ages[key] += passed_s
        return [key for key, age_s in self._ages.items() if age_s >= self._silence_s]
