"""Detection of a removed run directory.

A directory that does not answer is waited for. One that was removed does not come back, and without
it no other process sees what a process does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slurmrl.backoff import Interval
from slurmrl.errors import RunGoneError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.run.paths import RunPaths
from slurmrl.run.reports import Cause, Failure
from slurmrl.workers.failure import failed

ITSELF = "."
LOOK_S = 5.0
GONE_S = 20.0
"""A directory that is missing for this long counts as removed; until then it may be moved back."""


class Presence:
    """Checks the run directory, at most every ``look_s`` seconds."""

    def __init__(
        self,
        paths: RunPaths,
        *,
        look_s: float = LOOK_S,
        clock: Callable[[], float] = time.monotonic,
        calls: SystemCalls = REAL,
    ) -> None:
        self._paths = paths
        self._look_s = look_s
        self._clock = clock
        self._calls = calls
        self._looks = Interval(look_s, clock)
        self._since: float | None = None
        """When a directory was first found missing."""

    def check(self) -> None:
        """Raise RunGoneError if the run directory was removed, RunFailedError if one of the
        directories for messages was: the next start makes that one again."""
        if not self._looks.due():
            return
        now = self._clock()
        missing = self._missing()
        if not missing:
            self._since = None
            return
        self._since = now if self._since is None else self._since
        if now - self._since < GONE_S:
            return
        run = self._paths.run
        if missing == [ITSELF]:
            raise RunGoneError(f"the run directory {run} was removed; its processes end")
        reason = (
            f"{', '.join(f'{name}/' for name in missing)} in {run} was removed while the trial ran"
        )
        no_host = ""  # is to blame, so none is avoided for it
        raise failed(Failure(cause=Cause.ENVIRONMENT, reason=reason, host=no_host))

    def sleep(self, seconds: float) -> None:
        """Pause between two attempts. Raises as `check`."""
        self._calls.sleep(seconds)
        self.check()

    def wait(self) -> None:
        """Wait until the run directory is there. Raises RunGoneError."""
        while self._missing() == [ITSELF]:
            self.sleep(self._look_s)

    def _missing(self) -> list[str]:
        """Return the names of missing directories; none where the file system does not answer."""
        try:
            names = set(self._calls.listdir(self._paths.run))
        except FileNotFoundError:
            return [ITSELF]
        except OSError:
            return []
        return sorted({path.name for path in self._paths.channels()} - names)


def make_channels(paths: RunPaths) -> None:
    """Make the directories through which processes exchange messages, where they are missing. The
    run directory itself must be there. Raises EnvironmentFailure."""
    for directory in paths.channels():
        atomic.make_private_directory(directory)
