"""Runs a server and ends all of its processes: python -I warden.py COMMAND…

It runs beside the server, in any Python, and imports nothing of slurmrl. Its standard input is a
pipe that its owner holds open and never writes to. When the pipe ends, because the owner closed it
or died, or when the server ends, the warden kills every process that the server has started,
daemons with sessions of their own included, and exits with the server's code (128 + n for signal
n). If the warden itself is killed, the kernel kills the server.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
"""Signals that Slurm sends to whole steps."""
OWNER = 0
"""Descriptor of the pipe."""
POLL_S = 0.002
TRACKER_S = 1.0
"""How long a resource tracker may outlive all others."""
LIBC = ctypes.CDLL(None, use_errno=True)


def main(command: list[str]) -> int:
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    warden = os.getpid()

    def before_exec() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != warden:
            os.kill(os.getpid(), signal.SIGKILL)

    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=before_exec)
    pidfd = os.pidfd_open(server.pid)
    poller = select.poll()
    poller.register(OWNER, select.POLLIN)
    poller.register(pidfd, select.POLLIN)
    poller.poll()
    ended = server.poll() is not None
    server.kill()
    code = server.wait()
    end_children()
    if not ended:
        return 0
    return code if code >= 0 else 128 - code


def end_children(within_s: float = math.inf) -> None:
    """Kill all children of this process, and what they leave behind, which becomes a child of this
    process in turn.

    Python's resource trackers free the shared memory of the processes that they belong to, once
    these have ended. Nothing else frees what a killed process has made, so trackers get TRACKER_S
    more to end by themselves.
    """
    now = time.monotonic()
    deadline, trackers_end = now + within_s, now + TRACKER_S
    while (children := child_pids()) and (now := time.monotonic()) < deadline:
        others = [pid for pid in children if not is_resource_tracker(pid)]
        if others:
            trackers_end = now + TRACKER_S
        for pid in children if now >= trackers_end else others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(POLL_S)


def child_pids() -> list[int]:
    """Children of this process, adopted ones and zombies included; none on a kernel without this
    list."""
    try:
        with open("/proc/thread-self/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:
        return []


def is_resource_tracker(pid: int) -> bool:
    """Whether this is a running tracker; a zombie has no command line."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
