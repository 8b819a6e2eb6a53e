"""Writer of this rank's part of a checkpoint or a weight version, in the background during
training."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from slurmrl import log
from slurmrl.errors import EnvironmentFailure
from slurmrl.fsio.calls import REAL
from slurmrl.fsio.primitives import discard
from slurmrl.tensors.checkpoint.tensors import SavedFile
from slurmrl.workers.messages import Saved

logger = log.get(__name__)


class Snapshot(Protocol):
    """A copy of weights, ready to be written by any thread."""

    def paths(self, directory: Path) -> list[Path]:
        """The files that `write` makes."""
        ...

    def write(self, directory: Path) -> list[SavedFile]:
        """Write them, durably. Raises EnvironmentFailure."""
        ...


class Saver:
    """Writes the snapshots of one order at a time, then sends `Saved` with the files, or with the
    error if the directory did not take them; that error ends nothing. Any other exception is a bug,
    which `wait` raises again."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._thread: threading.Thread | None = None
        self._bug: Exception | None = None

    def start(
        self,
        snapshots: Sequence[Snapshot],
        directory: Path,
        seq: int,
        say: Callable[[Saved], None],
    ) -> None:
        """Write in a thread, which calls ``say`` once everything is on disk."""

        def run() -> None:
            say(self._write(snapshots, directory, seq))

        self._thread = threading.Thread(target=run, name="saver", daemon=True)
        self._thread.start()

    def write(
        self,
        snapshots: Sequence[Snapshot],
        directory: Path,
        seq: int,
        say: Callable[[Saved], None],
    ) -> None:
        """Write synchronously."""
        say(self._write(snapshots, directory, seq))
        self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises the exception of a bug in `_write`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._bug is not None:
            raise self._bug

    def _write(self, snapshots: Sequence[Snapshot], directory: Path, seq: int) -> Saved:
        saved = Saved(rank=self._rank, seq=seq)
        try:
            files = tuple(file for each in snapshots for file in each.write(directory))
        except EnvironmentFailure as error:
            logger.warning("%s", error)
            for path in (path for each in snapshots for path in each.paths(directory)):
                discard(path, REAL)  # or there may be no room to report it
            return replace(saved, error=str(error))
        except Exception as error:  # noqa: BLE001 - a thread's boundary: the rank raises it
            traceback.print_exc()
            self._bug = error
            return replace(saved, error=f"{type(error).__name__}: {error}")
        return replace(saved, files=files)
