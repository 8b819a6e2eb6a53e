"""The loop of all commands that follow a trial: look, wait, look again, until the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import click

from slurmrl.backoff import Backoff
from slurmrl.errors import EnvironmentFailure, OwnershipError, UnknownNameError

if TYPE_CHECKING:
    from slurmrl.run.paths import RunPaths
    from slurmrl.scheduler.base import JobIds, Scheduler, TaskState

FIRST_S, LONGEST_S = 0.3, 5.0
"""Pauses between two looks: after news, and when nothing has changed for long."""
SLICE_S = 0.1
"""A pause that Ctrl-C must end is slept in slices of this length."""


class Seen(Enum):
    """The result of one look."""

    NEWS = "news"
    NOTHING_NEW = "nothing new"
    END = "end"


class Interrupts:
    """Counts Ctrl-C instead of raising KeyboardInterrupt in the middle of a look."""

    def __init__(self) -> None:
        self.count = 0
        self.handled = 0

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._add)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    @property
    def pending(self) -> bool:
        return self.count > self.handled

    def _add(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def follow(
    look: Callable[[], Seen],
    first_s: float = FIRST_S,
    longest_s: float = LONGEST_S,
    *,
    on_interrupt: Callable[[int], bool] | None = None,
    interrupts: Interrupts | None = None,
    sleep: Callable[[float], None] | None = None,
) -> None:
    """Call ``look`` until it returns END. Pauses grow from ``first_s`` to ``longest_s`` while there
    is no news. A directory or a scheduler that does not answer is reported once and tried again.

    Ctrl-C raises KeyboardInterrupt as usual. With ``on_interrupt`` it ends the pause instead, and
    that is called with the number of interrupts so far; it returns whether to stop following.
    ``interrupts``: those that the caller counts already.
    """
    sleep = sleep or time.sleep
    backoff = Backoff(first_s, longest_s)
    problem: str | None = None
    with ExitStack() as stack:
        if on_interrupt is not None and interrupts is None:
            interrupts = stack.enter_context(Interrupts())
        while True:
            seen, before = Seen.NOTHING_NEW, problem
            try:
                seen, problem = look(), None
            except OwnershipError:
                raise  # waiting does not change this
            except EnvironmentFailure as error:
                problem = str(error)
                if problem != before:
                    click.echo(f"cannot read the trial, trying again: {problem}", err=True)
            if seen is Seen.END:
                return
            if seen is Seen.NEWS:
                backoff.reset()
            _pause(backoff.next_s(), interrupts, sleep)
            if on_interrupt is not None and interrupts is not None and interrupts.pending:
                interrupts.handled = interrupts.count
                if on_interrupt(interrupts.count):
                    return


def _pause(seconds: float, interrupts: Interrupts | None, sleep: Callable[[float], None]) -> None:
    if interrupts is None:
        sleep(seconds)
        return
    deadline = time.monotonic() + seconds
    while not interrupts.pending and time.monotonic() < deadline:
        sleep(min(SLICE_S, seconds))


def has_ended(paths: RunPaths) -> bool:
    """Whether the history ends the trial. Ask before reading what its processes wrote: then
    nothing that they wrote before the end is missed. Raises UnknownNameError for a removed trial.
    """
    from slurmrl.fsio import atomic
    from slurmrl.run.history.recent import recent

    try:
        atomic.read(paths.identity)
    except FileNotFoundError:
        trial = f"{paths.experiment}/{paths.trial}"
        raise UnknownNameError(f"trial {trial} was removed: {paths.run} is gone") from None
    return recent(paths.history, exports=False).end is not None


def polled_query(kind: str, scheduler: Scheduler) -> Callable[[JobIds], list[TaskState]]:
    """Return a query for use at every look: a shared scheduler is asked far less often than that,
    and its last answer is returned in between."""
    from slurmrl.scheduler.base import SchedulerPoll

    return scheduler.query if kind == "local" else SchedulerPoll(kind, scheduler).query


class PolledScheduler:
    """A scheduler that is asked seldom, however often a command looks at the run directories."""

    def __init__(self, kind: str) -> None:
        from slurmrl.scheduler import make

        scheduler = make(kind)
        self.recover = scheduler.recover
        self.query = polled_query(kind, scheduler)
