"""A sink (a copy of a trial's metrics in the format of another program) and its feeder.

A sink gets the steps of ``metrics.jsonl`` after they are committed, in order. A step that a later
incarnation repeats was not committed, so no sink has it. If a process is killed while it sends a
step, the sink determines its newest step when it is opened again. The feeder is a thread, because a
server that does not answer must not delay training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Condition, Thread
from typing import Any, Protocol

from slurmrl import log
from slurmrl.backoff import Backoff
from slurmrl.config.load import load_resolved
from slurmrl.display.terminal import first_line
from slurmrl.errors import CorruptFileError, StaleIncarnationError, TrialEndedError
from slurmrl.fsio import documents
from slurmrl.fsio.atomic import make_private_directory, replace
from slurmrl.fsio.documents import INTEGER, TEXT
from slurmrl.run import metrics
from slurmrl.run.metrics import TIME
from slurmrl.run.paths import RunPaths

logger = log.get(__name__)

LINES = 500
"""Maximum number of lines that are sent at once."""
PAUSES_S = (2.0, 120.0)
"""First and longest pause in seconds before a failed sink is opened again."""
Lines = Sequence[Mapping[str, Any]]
"""Lines of ``metrics.jsonl`` with increasing steps."""


class Sink(Protocol):
    """A sink is opened with the last step that it certainly has (-1: none).

    If the sink's files or its run are missing, it begins with the first step again.
    """

    @property
    def last(self) -> int:
        """Step after which the sink continues."""

    @property
    def kept(self) -> int:
        """The last step that the sink still has if this process or host is killed now."""

    def log(self, lines: Lines) -> None:
        """Record the steps after `last`."""

    def close(self) -> None:
        """Flush and close; `kept` then equals `last`."""


class Feeder:
    """Sends a sink the committed steps that it lacks.

    A file records the last step that the sink certainly has. The feeder writes the file after the
    sink has accepted steps, so a sink is never opened with a step that is too late.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[int], Sink],
        paths: RunPaths,
        *,
        committed: int,
        check: Callable[[], object],
    ) -> None:
        self.name = name
        self._make = make
        self._paths = paths
        self._file = paths.sink(name)
        self._check = check
        self._base = self._target = committed
        self._delivered = -1
        """The last step whose line this feeder has read."""
        self._sink: Sink | None = None
        self._kept = -1
        self._ends = False
        self._news = Condition()
        self._thread = Thread(target=self._run, name=f"feeder of {name}", daemon=True)
        self._thread.start()

    def committed(self, step: int) -> None:
        with self._news:
            self._target = max(self._target, step)
            self._news.notify()

    @property
    def is_behind(self) -> bool:
        """Whether the sink lacks committed steps that it can still get."""
        return self._thread.is_alive() and self._delivered < self._target

    def end(self) -> None:
        """Close the sink when it has all steps, or if it fails."""
        with self._news:
            self._ends = True
            self._news.notify()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # -- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        backoff = Backoff(*PAUSES_S)
        while True:
            with self._news:
                self._news.wait_for(lambda: self._ends or self._delivered < self._target)
                target, ends = self._target, self._ends
            try:
                self._deliver(target)
                backoff.reset()
                if ends:
                    self._close()
                    return
            except StaleIncarnationError as error:
                logger.info("%s gets no more metrics from now on: %s", self.name, error)
                return
            except Exception as error:  # noqa: BLE001 - a sink's library must not stop training
                self._drop()
                reason = first_line(error) or type(error).__name__
                logger.warning("logging.%s lacks steps up to %d: %s", self.name, target, reason)
                if ends:
                    return
                with self._news:
                    self._news.wait_for(lambda: self._ends, backoff.next_s())

    def _deliver(self, target: int) -> None:
        if self._sink is None:
            self._may_write()
            self._kept = min(self._read_kept(), self._base)
            self._sink = self._make(self._kept)
        sink = self._sink
        lines = metrics.read_between(self._paths.metrics, sink.last, target)
        for at in range(0, len(lines), LINES):
            self._may_write()
            sink.log(lines[at : at + LINES])
            self._write_kept(sink.kept)
        self._delivered = target

    def _close(self) -> None:
        if self._sink is not None:
            self._sink.close()
            self._write_kept(self._sink.kept)

    def _drop(self) -> None:
        """Close the sink if possible. A reopened sink determines its newest step."""
        sink, self._sink, self._delivered = self._sink, None, -1
        if sink is not None:
            with suppress(Exception):
                sink.close()

    def _may_write(self) -> None:
        """Raise StaleIncarnationError if the feeder must not write any more.

        After the end of the trial, the feeder may still write steps that were committed before.
        """
        with suppress(TrialEndedError):
            self._check()

    def _read_kept(self) -> int:
        """Return the recorded step; -1 if the step is unknown and the sink must determine it."""
        try:
            kept: int = documents.read(self._file, {"step": INTEGER}, ("step",))["step"]
        except (FileNotFoundError, CorruptFileError):
            return -1
        return kept

    def _write_kept(self, step: int) -> None:
        if step != self._kept:
            make_private_directory(self._file.parent)
            replace(self._file, metrics.encode({"step": step}))
            self._kept = step


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric values, except step and time."""
    return {
        name: float(value)
        for name, value in values.items()
        if name not in ("step", TIME)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }


def settings(paths: RunPaths) -> dict[str, Any]:
    """Return the resolved configuration without environment variables, which may be secrets."""
    found: dict[str, Any] = load_resolved(paths.config).model_dump(mode="json")
    del found["cluster"]["env"]
    return found


def uuid(paths: RunPaths) -> str:
    """Return the identifier that distinguishes this trial from trials with the same name."""
    found: str = documents.read(paths.identity, {"uuid": TEXT}, ("uuid",))["uuid"]
    return found
