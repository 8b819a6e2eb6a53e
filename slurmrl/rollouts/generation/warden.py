"""Run a server and end all of its processes.

Usage: ``python -I warden.py COMMAND…``

The warden runs next to the server, in any Python, and imports nothing of slurmrl. The warden's
standard input is a pipe that its owner keeps open without writing to it. The pipe ends when the
owner closes it or exits. When the pipe or the server ends, the warden kills every process that the
server has started, even daemons in other sessions. The warden exits with the server's code (128 + n
for signal n). If the warden itself is killed, the kernel kills the server.

Killed processes of SGLang and of Python's multiprocessing leave files in /dev/shm. The warden
removes the files that the server's processes have mapped. A list of these files is in the server's
folder of temporary files. If the warden is killed, the process that removes this folder also
removes the files.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
"""Signals that Slurm sends to whole steps; the warden ignores them."""
OWNER = 0
"""Descriptor of the pipe."""
POLL_S = 0.002
LOOK_S = 1.0
"""Seconds between two searches for files in shared memory. (The mappings of a process are unknown
after its end.)"""
NEW_S = 60.0
"""Maximum age in seconds of files whose mappings are searched. (A server maps a file when it makes
the file.)"""
SHARED = "/dev/shm/"
KINDS = ("sglang_loads_", "sem.mp-")
"""Prefixes of the names of files that a killed server leaves in shared memory."""
LIST = "shared-memory"
TRACKER_S = 1.0
"""Seconds in which a resource tracker may run after all other processes have ended."""
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
    temporary = os.environ.get("TMPDIR")
    listed = os.path.join(temporary, LIST) if temporary else os.devnull
    remove_shared(listed)  # An earlier server's warden may have been killed.
    held: set[str] = set()
    while not poller.poll(1000 * LOOK_S):
        held = note_shared(listed, held)
    ended = server.poll() is not None
    note_shared(listed, held)
    server.kill()
    code = server.wait()
    leftovers = Leftovers()
    while leftovers.kill():
        time.sleep(POLL_S)
    remove_shared(listed)
    if not ended:
        return 0
    return code if code >= 0 else 128 - code


class Leftovers:
    """Kills the children of this process and their descendants.

    When a child is killed, its children become children of this process.

    A resource tracker of Python frees the shared memory of its process after the process has ended.
    Nothing else frees this memory, so trackers get `TRACKER_S` seconds to exit by themselves.
    """

    def __init__(self) -> None:
        self._trackers_end = time.monotonic() + TRACKER_S

    def kill(self, spared: Collection[int] = ()) -> bool:
        """Kill all children except ``spared``. Return True if the caller must call again soon."""
        children = [pid for pid in child_pids() if pid not in spared]
        others = [pid for pid in children if not is_resource_tracker(pid)]
        now = time.monotonic()
        if others:
            self._trackers_end = now + TRACKER_S
        for pid in children if now >= self._trackers_end else others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return bool(children)


def child_pids() -> list[int]:
    """Return the children of this process, including adopted children and zombies.

    Return [] if the kernel does not list children.
    """
    try:
        with open("/proc/thread-self/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:
        return []


def descendants(pid: str = "self") -> list[str]:
    """Return all descendants of a process. The kernel lists children by thread."""
    found: list[str] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += file.read().split()
    return found + [each for child in found for each in descendants(child)]


def note_shared(listed: str, known: set[str]) -> set[str]:
    """Add the files of `KINDS` that the server's processes have mapped now to ``known`` files.

    Each file is a line with inode and name. Write the result to ``listed`` if it has grown.

    Inodes identify the files, because a new semaphore is mapped under a temporary name.
    """
    named = {f"{inode} {name}\n": inode for inode, name in new_files()}
    mapped: set[str] = set()
    for pid in descendants() if named.keys() - known else ():
        with suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as file:
            mapped.update(line.split(maxsplit=5)[4] for line in file if SHARED in line)
    found = known | {line for line, inode in named.items() if inode in mapped}
    if found != known:
        with suppress(OSError), open(listed, "w", encoding="utf-8") as file:
            file.writelines(sorted(found))
    return found


def new_files() -> list[tuple[str, str]]:
    """Return (inode, name) of this user's new files of `KINDS`."""
    try:
        with os.scandir(SHARED) as entries:
            chosen = [each for each in entries if each.name.startswith(KINDS)]
            found = [(each.name, each.stat(follow_symlinks=False)) for each in chosen]
    except OSError:  # a file was removed, or there is no such folder
        return []
    return [
        (str(status.st_ino), name)
        for name, status in found
        if status.st_uid == os.getuid() and time.time() - status.st_ctime < NEW_S
    ]


def remove_shared(listed: str) -> None:
    """Remove the listed files that a server has left, unless another file has taken the name."""
    try:
        with open(listed, encoding="utf-8") as file:
            lines = [line.split() for line in file]
    except (OSError, UnicodeDecodeError):
        return
    for inode, name in (line for line in lines if len(line) == 2):
        if name.startswith(KINDS) and "/" not in name:
            with suppress(OSError):
                status = os.lstat(SHARED + name)
                if status.st_uid == os.getuid() and str(status.st_ino) == inode:
                    os.unlink(SHARED + name)


def is_resource_tracker(pid: int) -> bool:
    """Return whether a process is a running resource tracker. A zombie has no command line."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
