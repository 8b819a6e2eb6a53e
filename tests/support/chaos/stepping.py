"""Processes that stop before each file operation until they may continue, so that they can be
killed at every point.

An actor is a forked process that runs a function. In it, the functions of ``os`` that touch files
are replaced (this also covers code that bypasses `fsio.calls`): before each operation, the actor
reports and waits for a token. Only one actor moves at a time, so the reports form a linear
history. fsync does nothing here, because SIGKILL leaves the page cache intact;
`tests.support.disk` tests durability. Sleeping takes no time.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MESSAGE_BYTES = 1 << 16
STUCK_S = 300.0
"""An operation takes less than a millisecond."""
PACED = (
    *("open", "read", "write", "pread", "pwrite", "close"),
    *("stat", "lstat", "link", "rename", "replace", "unlink", "remove"),
    *("mkdir", "rmdir", "listdir", "scandir", "chmod"),
)
QUIET = ("close", "stat", "lstat", "chmod", "scandir", "fsync", "fdatasync")
"""Operations before which only the victim and its successor stop: other actors could not observe
whether they happened."""
WRITES = ("write", "pwrite")
GO, HALF = b"g", b"h"

Note = Callable[..., None]
Actor = Callable[[Path, int, Note], None]


class Pacer:
    """The actor's side."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self.quiet: tuple[str, ...] = ()
        """Operations that are not reported."""

    def install(self) -> None:
        for name in PACED:
            setattr(os, name, self._paced(name, getattr(os, name)))
        for name in ("fsync", "fdatasync"):
            setattr(os, name, self._paced(name, lambda descriptor: None))
        time.sleep = self._paced("sleep", lambda seconds: None)

    def note(self, **event: Any) -> None:
        self._line.send(json.dumps({"note": event}).encode())

    def turn(self, operation: str) -> bytes:
        self._line.send(json.dumps({"operation": operation}).encode())
        return self._line.recv(1)

    def _paced(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def paced(*arguments: Any, **options: Any) -> Any:
            if name in self.quiet:
                return real(*arguments, **options)
            token = self.turn(name)
            if not token:
                os._exit(3)  # The controller has exited.
            if token == HALF and name in WRITES and len(arguments[1]) > 1:
                half = memoryview(arguments[1])[: len(arguments[1]) // 2]
                arguments = (arguments[0], half, *arguments[2:])
            return real(*arguments, **options)

        return paced


class Process:
    """The controller's side of an actor's process, which runs one part after the other. During a
    part, the process stops before ``operation``. With None, it waits for the next part.
    """

    def __init__(self, parts: Mapping[str, Actor]) -> None:
        self.operation: str | None = None
        self.number = 0
        self.count = 0
        """Executed operations of this part."""
        self._parts = parts
        self._pid = 0

    def begin(self, part: str, folder: Path, number: int, *, quiet: bool) -> None:
        """Start a part; start the process if there is none. ``quiet``: see `QUIET`."""
        if not self._pid:
            self._fork()
        self.number, self.count, self.operation = number, 0, "start"
        self._line.send(json.dumps([part, str(folder), number, quiet]).encode())

    def go(self, note: Callable[[dict[str, Any]], None], *, half: bool = False) -> None:
        """Let the actor execute its operation. Receive its reports until it stops before the next
        operation.
        """
        if self.operation != "start":
            self.count += 1
            self._line.send(HALF if half else GO)
        while True:
            message = json.loads(self._receive())
            if "operation" in message:
                self.operation = message["operation"]
                return
            note({"actor": self.number, **message["note"]})
            if message["note"]["event"] in ("end", "crash"):
                self.operation = None
                return

    def _receive(self) -> bytes:
        try:
            return self._line.recv(MESSAGE_BYTES)
        except TimeoutError:
            at = f"{self.count}:{self.operation}"
            raise TimeoutError(
                f"actor {self.number} (process {self._pid}) did not come back from {at} "
                f"within {STUCK_S:.0f} s"
            ) from None

    def kill(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._line.close()
            self.operation, self._pid = None, 0

    def _fork(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            os.closerange(3, theirs.fileno())  # other actors' pipes, so that they see our end
            os.closerange(theirs.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
            _live(self._parts, theirs)
        theirs.close()
        self._line.settimeout(STUCK_S)


def _live(parts: Mapping[str, Actor], line: socket.socket) -> None:
    """The main function of an actor's process."""
    pacer = Pacer(line)
    pacer.install()
    while data := line.recv(MESSAGE_BYTES):
        part, folder, number, quiet = json.loads(data)
        pacer.quiet = QUIET if quiet else ()
        try:
            parts[part](Path(folder), number, pacer.note)
        except BaseException as error:  # noqa: BLE001 - a process boundary
            pacer.note(event="crash", error=f"{type(error).__name__}: {error}"[:1000])
        else:
            pacer.note(event="end")
    os._exit(0)
