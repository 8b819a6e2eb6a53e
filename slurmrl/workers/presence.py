"""Whether the run directory is still there. One that does not answer is waited for; one that was
removed does not come back, and without it nothing that a process does is seen by anybody."""

from __future__ import annotations

import time
from collections.abc import Callable

from slurmrl.errors import RunFailedError, RunGoneError
from slurmrl.fsio import atomic
from slurmrl.fsio.calls import REAL, SystemCalls
from slurmrl.paths import RunPaths
from slurmrl.workers.failure import Cause

ITSELF = "."
LOOK_S = 5.0
GONE_S = 20.0
"""For so long a directory is missing before it counts as removed: somebody may move it back."""


class Presence:
    """Looks at the run directory at most every ``look_s``."""

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
        self._next_look = clock()
        self._since: float | None = None
        """When something was first seen to be missing."""

    def check(self) -> None:
        """Raises RunGoneError where the run directory was removed, RunFailedError where one was
        that its processes talk through: the next start makes that again."""
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + self._look_s
        missing = self._missing()
        if not missing:
            self._since = None
            return
        self._since = now if self._since is None else self._since
        if now - self._since < GONE_S:
            return
        run = self._paths.run
        if missing == [ITSELF]:
            raise RunGoneError(f"the run directory {run} was removed: nothing can go on")
        reason = (
            f"{', '.join(f'{name}/' for name in missing)} in {run} was removed while it was used"
        )
        raise RunFailedError(reason, {"cause": Cause.ENVIRONMENT, "reason": reason})

    def sleep(self, seconds: float) -> None:
        """A pause between two tries. Raises as `check`."""
        self._calls.sleep(seconds)
        self.check()

    def wait(self) -> None:
        """Return once the run directory is there, at once if it is. Raises RunGoneError."""
        while self._missing() == [ITSELF]:
            self.sleep(self._look_s)

    def _missing(self) -> list[str]:
        """Names that are not there; none where the directory does not answer."""
        try:
            names = set(self._calls.listdir(self._paths.run))
        except FileNotFoundError:
            return [ITSELF]
        except OSError:
            return []
        return sorted({path.name for path in self._paths.channels()} - names)


def make_channels(paths: RunPaths) -> None:
    """The directories through which processes talk to each other, where they are missing. The run
    directory itself must be there. Raises EnvironmentFailure."""
    for directory in paths.channels():
        atomic.make_private_directory(directory)
