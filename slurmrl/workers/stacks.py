"""Stacks of a process on request, even if it hangs.

SIGQUIT makes a process write the Python stacks of its threads into memory that it shares with its
agent. The interpreter's fault handler does that inside the signal handler, so it works while the
interpreter lock is held or a collective never ends. Only a process that is stopped or blocked in
the kernel cannot answer. The pulse thread then adds what needs Python (torch's flight recorder) and
the last line, as soon as it runs.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
from types import FrameType

SIGNAL = signal.SIGQUIT
OPTION = "--stacks-fd"
LAST_LINE = "(end)\n"


def new_file() -> int:
    """Return the descriptor of a file in memory to which several processes can append."""
    descriptor = os.memfd_create("stacks")
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_APPEND)
    return descriptor


def answer(descriptor: int) -> None:
    """Make this process, and those forked from it, answer the signal. Main thread only.

    The fault handler passes the signal on to Python's own handler, which only wakes `wakeup`.
    """
    signal.signal(SIGNAL, _ignore)
    signal.siginterrupt(SIGNAL, False)
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True, chain=True)


def wakeup() -> int:
    """Return a descriptor that is readable after each signal, also in a blocked main thread."""
    ours, theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    return ours


def finish(descriptor: int, text: str) -> None:
    """Append what only a running interpreter can provide, and the last line."""
    os.write(descriptor, (text + LAST_LINE).encode())


def take(descriptor: int, most_bytes: int) -> tuple[str, bool]:
    """Return what a process has written since `clear`, and whether that is complete.

    Text beyond ``most_bytes`` is cut.
    """
    data = os.pread(descriptor, most_bytes, 0)
    size = os.fstat(descriptor).st_size
    text = data.decode(errors="replace")
    if size > most_bytes:
        return f"{text}\n({size - most_bytes} more bytes omitted)\n", True
    return text.removesuffix(LAST_LINE), text.endswith(LAST_LINE)


def own(most_bytes: int) -> str:
    """Return the stacks of this process, with the calling thread in this function."""
    descriptor = new_file()
    try:
        faulthandler.dump_traceback(descriptor, all_threads=True)
        return take(descriptor, most_bytes)[0]
    finally:
        os.close(descriptor)


def clear(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: the fault handler has written the stacks."""
