"""What a process is doing, told on request even if it hangs.

SIGQUIT makes a process write the Python stacks of its threads into memory that it shares with its
agent. The interpreter's fault handler does that inside the signal handler, so a held interpreter
lock or a collective that never ends does not matter; only a process that is stopped, or that the
kernel holds, cannot answer. The pulse thread then adds what needs Python (torch's flight
recorder) and the last line, as soon as it gets to run.
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
    """A file in memory that several processes append to; a child inherits it if told to."""
    descriptor = os.memfd_create("stacks")
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_APPEND)
    return descriptor


def answer(descriptor: int) -> None:
    """From here on this process, and what is forked from it, answers the signal. Main thread only.

    The fault handler passes the signal on to Python's own, whose only use is to wake `wakeup`.
    """
    signal.signal(SIGNAL, _ignore)
    signal.siginterrupt(SIGNAL, False)
    faulthandler.register(SIGNAL, file=descriptor, all_threads=True, chain=True)


def wakeup() -> int:
    """A descriptor that can be read after each signal, also while the main thread is blocked."""
    ours, theirs = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    return ours


def finish(descriptor: int, text: str) -> None:
    """Add to the stacks what only a running interpreter can tell."""
    os.write(descriptor, (text + LAST_LINE).encode())


def take(descriptor: int, most_bytes: int) -> tuple[str, bool]:
    """What a process has written since the last time, and whether that is all. It is cut where it
    is longer than ``most_bytes``."""
    data = os.pread(descriptor, most_bytes, 0)
    size = os.fstat(descriptor).st_size
    text = data.decode(errors="replace")
    if size > most_bytes:
        return f"{text}\n({size - most_bytes} more bytes are left out)\n", True
    return text.removesuffix(LAST_LINE), text.endswith(LAST_LINE)


def clear(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The stacks are written already."""
