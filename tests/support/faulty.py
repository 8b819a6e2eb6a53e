"""A file layer in which one operation, or each operation from one on, fails before or after it
takes effect.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurmrl.fsio.calls import SystemCalls

OPERATIONS = frozenset(
    name
    for name in vars(SystemCalls)
    if not name.startswith("_") and name not in ("sleep", "mode", "caches")
)
REPEATED = {
    "link": errno.EEXIST,
    "mkdir": errno.EEXIST,
    "open": errno.EEXIST,
    "rename": errno.ENOENT,
    "unlink": errno.ENOENT,
}
"""The server's answer if the reply was lost and the client repeated the request."""


class Clock:
    """Seconds that pass only on request."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class KilledError(BaseException):
    """Stands for a kill of the process."""


class Faulty(SystemCalls):
    """Counts operations.

    Operation ``at`` and the next ``times - 1`` fail with ``error``. ``killed``: the process is
    killed at operation ``at`` instead, halfway through a write. ``done``: the operation takes
    effect, and only its reply is lost. Sleeping and, with ``hang_s``, each operation advance the
    clock and take no real time.
    """

    def __init__(
        self,
        at: int = -1,
        error: int = 0,
        *,
        times: int = 1,
        done: bool = False,
        killed: bool = False,
        hang_s: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        self.at, self.error, self.times, self.done = at, error, times, done
        self.killed = killed
        self.hang_s = hang_s
        self.clock = clock or Clock()
        self.count = 0
        self.names: list[str] = []
        """Names of the called operations."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return self._faulty(name, value) if name in OPERATIONS else value

    def fsync(self, descriptor: int) -> None:
        """Do nothing; `tests.support.disk` tests durability."""

    def fsync_directory(self, directory: Path) -> None:
        os.stat(directory)

    def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def _faulty(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any) -> Any:
            number = self.count
            self.count += 1
            self.names.append(name)
            self.clock.advance(self.hang_s)
            if self.killed and 0 <= self.at <= number:
                if name == "write" and number == self.at:
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                if name == "close":  # The kernel closes it.
                    real(*arguments)
                raise KilledError
            if not self.at <= number < self.at + self.times:
                return real(*arguments)
            if self.done or name == "close":  # A failed close closes the file too.
                result = real(*arguments)
                if name == "open":
                    os.close(result)
            raise OSError(self.error, os.strerror(self.error))

        return operation
