"""Follow trials by repeated reads until they end, and show a submitted trial."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from slurmrl.backoff import Backoff
from slurmrl.cli import status_text
from slurmrl.display.terminal import age, plain, sparkline
from slurmrl.errors import EnvironmentFailure, OwnershipError, UnknownNameError
from slurmrl.fsio import atomic
from slurmrl.run.history.state import recent
from slurmrl.run.metrics import read_latest
from slurmrl.run.paths import RunPaths
from slurmrl.scheduler.base import JobIds, Scheduler, SchedulerPoll, TaskState
from slurmrl.watch.snapshot import read
from slurmrl.watch.status import assemble

if TYPE_CHECKING:
    from slurmrl.desk.trial_jobs import Jobs

FIRST_S, LONGEST_S = 0.3, 5.0
"""Shortest and longest pause between two reads, in seconds. After news, pauses restart with the
shortest pause."""
SLICE_S = 0.1
"""Seconds between two checks for Ctrl-C during a pause."""
CURVE_STEPS, CURVE_WIDTH = 400, 40
"""Number of newest steps in the curve of the live view, and its width in columns."""
MOST_LINES = 100
"""Maximum number of steps to print after one read."""
POLL_S = {"local": 0.5}
"""Mapping from a scheduler to the seconds between two reads of a run."""
SHARED_POLL_S = 10.0
"""Seconds between two reads if other users share the scheduler and the directory."""
LEAVE_S = 15.0
"""Seconds to wait for the processes of an ended local trial to exit."""
EXIT_CODES = {"COMPLETED": 0, "FAILED": 1}
INTERRUPTED = 130


class Seen(Enum):
    """The result of one read of a trial."""

    NEWS = "news"
    NOTHING_NEW = "nothing new"
    END = "end"


class Interrupts:
    """Counts Ctrl-C during the context instead of raising KeyboardInterrupt."""

    def __init__(self) -> None:
        self.count = 0
        self.handled = 0

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._add)
        return self

    def __exit__(self, *raised: object) -> None:
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
    """Call ``look`` until it returns END.

    Pauses grow from ``first_s`` to ``longest_s`` seconds while there is no news. An error of the
    directory or the scheduler is reported once, and ``look`` is called again.

    Without ``on_interrupt``, Ctrl-C raises KeyboardInterrupt as usual. Otherwise Ctrl-C ends the
    pause and calls ``on_interrupt`` with the number of interrupts so far. The function returns
    whether to stop following. ``interrupts`` is the counter of a caller that already counts Ctrl-C.
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
                raise  # Waiting does not change the owner of the directory.
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
    """Return whether the trial has ended according to its history.

    Call this function before reading the output of the processes: if the trial has ended, the
    output is complete. Raises UnknownNameError for a removed trial.
    """
    try:
        atomic.read(paths.identity)
    except FileNotFoundError:
        trial = paths.full_name
        raise UnknownNameError(f"trial {trial} was removed: {paths.run} is missing") from None
    return recent(paths.history, exports=False).end is not None


def polled_query(kind: str, scheduler: Scheduler) -> Callable[[JobIds], list[TaskState]]:
    """Return a query that may be called often. For a shared scheduler, answers may be old."""
    return scheduler.query if kind == "local" else SchedulerPoll(kind, scheduler).query


class PolledScheduler:
    """A scheduler for commands that often read run directories (see `polled_query`)."""

    def __init__(self, kind: str) -> None:
        from slurmrl.scheduler import make

        scheduler = make(kind)
        self.recover = scheduler.recover
        self.query = polled_query(kind, scheduler)


class TrialFollower:
    """Follows one submitted trial. Ctrl-C stops a local run, but not the jobs of Slurm."""

    def __init__(
        self,
        paths: RunPaths,
        kind: str,
        jobs: Jobs,
        view: View,
        *,
        interrupts: Interrupts | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self._paths = paths
        self._local = kind == "local"
        self._poll_s = POLL_S.get(kind, SHARED_POLL_S)
        self._jobs = jobs
        self._query = polled_query(kind, jobs.scheduler)
        self._view = view
        self._interrupts = interrupts
        self._sleep = sleep
        self._tasks: list[TaskState] = []
        self._leave_at: float | None = None
        self._status: dict[str, Any] | None = None

    def run(self) -> dict[str, Any]:
        """Follow the trial until it ends or the user stops watching; return the last status.

        Raises KeyboardInterrupt if the user stops before the first status.
        """
        follow(
            self._look,
            self._poll_s,
            self._poll_s,
            on_interrupt=self._interrupted,
            interrupts=self._interrupts,
            sleep=self._sleep,
        )
        if self._status is None:
            raise KeyboardInterrupt
        return self._status

    def _look(self) -> Seen:
        problem = None
        try:
            self._tasks = self._query(self._jobs.ids)
        except EnvironmentFailure as error:
            problem = str(error)  # `_tasks` keeps the scheduler's last answer.
        self._status = assemble(read(self._paths), self._tasks, problem=problem)
        self._view.update(self._status)
        return Seen.END if self._is_over(self._status["state"]) else Seen.NEWS

    def _is_over(self, state: str) -> bool:
        """Return whether to stop following.

        For a local trial, wait until its processes have exited, but at most LEAVE_S seconds.
        """
        if state in status_text.LIVES:
            return False
        self._leave_at = self._leave_at or time.monotonic() + LEAVE_S
        active = any(task.state.active for task in self._tasks)
        return not (self._local and active) or time.monotonic() >= self._leave_at

    def _interrupted(self, count: int) -> bool:
        """At the first Ctrl-C, stop a local run after a commit; at the second Ctrl-C, kill it.

        Return whether to stop following.
        """
        if not self._local:
            return True
        if count == 1:
            self._view.note(
                "stopping at the next step with a commit; press Ctrl-C again to kill the run"
            )
            self._jobs.scheduler.interrupt(self._jobs.ids)
        else:
            self._view.note("killing the run; the last commit is kept")
            self._jobs.scheduler.kill(self._jobs.ids)
        return False


def exit_code(status: dict[str, Any]) -> int:
    """Return 0 for a completed trial, 1 for a failed trial and 130 for an interrupted trial."""
    return EXIT_CODES.get(status["state"], INTERRUPTED)


class View(AbstractContextManager["View"]):
    """Base class of views. This class shows nothing, as ``--json`` requires."""

    def update(self, status: status_text.Status) -> None:
        """Show a new status."""

    def note(self, text: str) -> None:
        """Show a message that is not part of the status."""

    def __exit__(self, *raised: object) -> None:
        return None


class PlainView(View):
    """Prints a line for each step, state change and commit after incarnation ``earlier``."""

    def __init__(self, earlier: int = 0, write: Callable[[str], Any] = click.echo) -> None:
        self._write = write
        self._step = -1
        self._earlier = self._incarnation = earlier
        self._printed: dict[str, str] = {}

    def update(self, status: status_text.Status) -> None:
        if status["incarnation"] != self._incarnation:
            self._begin(status)
        lives = status["state"] in status_text.LIVES
        if lives:
            self._print_state(status)
        if status["incarnation"] > self._earlier:
            self._print_progress(status)
        if not lives:  # print the state after the trial's last steps
            self._print_state(status)

    def _print_state(self, status: status_text.Status) -> None:
        self._print_once("state", f"{status['state']} {status_text.note(status)}".strip())

    def _print_progress(self, status: status_text.Status) -> None:
        for line in read_latest(RunPaths(Path(status["run"])).metrics, MOST_LINES):
            if line["step"] > self._step:
                self._step = line["step"]
                where = f"step {status_text.progress({**status, 'step': line['step']})}"
                self._write(f"{where}  {status_text.metrics(line)}".rstrip())
        if status["checkpoint"] is not None:
            self._print_once("commit", f"committed step {status['checkpoint']['step']}")

    def note(self, text: str) -> None:
        self._write(text)

    def _begin(self, status: status_text.Status) -> None:
        """Prepare for a new incarnation, which repeats and prints the steps after the commit."""
        committed = status["checkpoint"]["step"] if status["checkpoint"] else -1
        self._step = min(self._step, committed) if self._step >= 0 else committed
        self._incarnation = status["incarnation"]
        if self._incarnation > 1:
            self._write(f"incarnation {self._incarnation} continues from step {max(committed, 0)}")

    def _print_once(self, kind: str, text: str) -> None:
        if self._printed.get(kind) != text:
            self._printed[kind] = text
            self._write(text)


class LiveView(View):
    """Redraws the progress in place; notes scroll above the progress."""

    def __init__(self) -> None:
        from rich.live import Live

        self._live = Live(transient=True, refresh_per_second=4)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._live.stop()

    def update(self, status: status_text.Status) -> None:
        lines = read_latest(RunPaths(Path(status["run"])).metrics, CURVE_STEPS)
        self._live.update(picture(status, lines))

    def note(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False)


def picture(status: status_text.Status, lines: Sequence[Mapping[str, Any]] = ()) -> Any:
    """Return the rich renderable of a running trial. ``lines`` are its newest metrics."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    total = status["total_steps"] or 1
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=total, completed=min(status["step"], total), width=40),
        Text(f"step {status_text.progress(status)}"),
        Text(remaining(status)),
    )
    head = f"{status['trial']}  {status['state']}"
    finding = status["findings"][0]
    why = "" if finding["code"] == "running" else plain(finding["text"])
    commit = f"commit: {status_text.commit(status)}"
    if status["incarnation"] > 1:
        commit += f"   incarnation {status['incarnation']}"
    rollouts = f"rollouts: {shown}" if (shown := status_text.rollouts(status)) else ""
    texts = (why, status_text.metrics(status["metrics"]), curve(lines), commit, rollouts)
    return Group(Text(head, style="bold"), bar, *(Text(text) for text in texts if text))


def curve(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return ``reward ▁▂▄▆█ 0.12 to 0.41, steps 1 to 60``; "" without a suitable metric.

    The curve shows the first metric of a progress line that has at least two values.
    """
    for name in sorted(status_text.SHOWN, key=lambda name: name.startswith("eval/")):
        points = [
            (line["step"], float(value))
            for line in lines
            if isinstance(value := line.get(name), int | float)
        ]
        if len(points) > 1:
            (first, before), (last, now) = points[0], points[-1]
            bars = sparkline([value for _, value in points], CURVE_WIDTH)
            values = f"{status_text.number(before)} to {status_text.number(now)}"
            return f"{name} {bars} {values}, steps {first} to {last}"
    return ""


def remaining(status: status_text.Status) -> str:
    """Return the step time and the remaining time at this pace; "" if unknown."""
    step_s, left_s = status["timing"]["step_s"], status["timing"]["left_s"]
    return f"{step_s:.3g} s/step, {age(left_s)} left" if step_s and left_s else ""


def make_view(*, silent: bool, earlier: int) -> View:
    """Return the view for this terminal; ``earlier`` is the number of earlier incarnations."""
    if silent:
        return View()
    return LiveView() if sys.stdout.isatty() else PlainView(earlier)
