"""Feeds one sink from ``metrics.jsonl``, in a thread: a server that does not answer must not hold
up training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Condition, Thread

from slurmrl import log
from slurmrl.backoff import Backoff
from slurmrl.errors import CorruptFileError, StaleIncarnationError, TrialEndedError
from slurmrl.fsio import documents
from slurmrl.fsio.atomic import make_private_directory, replace
from slurmrl.fsio.shapes import INTEGER
from slurmrl.run import metrics
from slurmrl.run.paths import RunPaths
from slurmrl.watch.sinks.base import Sink

logger = log.get(__name__)

LINES = 500
"""Most lines that are handed over at once."""
PAUSES_S = (2.0, 120.0)
"""First and longest pause before a sink that failed is opened again."""


class Feeder:
    """Hands a sink the committed steps that it lacks.

    A file says up to which step the sink certainly holds everything. It is written after the sink
    has taken steps, so a sink is opened with that step or an earlier one, never with a later one.
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
        """The step up to which this feeder has looked for lines."""
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
        """Whether the sink lacks committed steps and can still get them."""
        return self._thread.is_alive() and self._delivered < self._target

    def end(self) -> None:
        """Close the sink when it has everything, or if it fails."""
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
                logger.info("%s gets no more metrics from here: %s", self.name, error)
                return
            except Exception as error:  # noqa: BLE001 - of a library that training does not need
                self._drop()
                told = str(error).strip().partition("\n")[0] or type(error).__name__
                logger.warning("logging.%s lacks steps up to %d: %s", self.name, target, told)
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
        """Close the sink as far as possible; the next one finds out what it holds."""
        sink, self._sink, self._delivered = self._sink, None, -1
        if sink is not None:
            with suppress(Exception):
                sink.close()

    def _may_write(self) -> None:
        """Raises StaleIncarnationError. An end of the trial does not hold back what was committed
        before it."""
        with suppress(TrialEndedError):
            self._check()

    def _read_kept(self) -> int:
        """-1 without the file or with a damaged one: the sink finds out what it holds."""
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
