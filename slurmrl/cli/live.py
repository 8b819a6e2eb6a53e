"""What is shown while a run is watched: a view that is redrawn in a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from slurmrl.cli import render
from slurmrl.monitor.metrics import read_latest
from slurmrl.monitor.words import age
from slurmrl.paths import RunPaths

MOST_LINES = 100
"""Steps between two looks that are printed at most."""


class View(AbstractContextManager["View"]):
    """Shows nothing: the base of the others, and what ``--json`` uses."""

    def update(self, status: render.Status) -> None:
        """Take in how the run is doing."""

    def note(self, text: str) -> None:
        """Say something that is not part of the status."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class PlainView(View):
    """A line for each step, each change of state and each commit, of incarnations after
    ``earlier``: what those did was shown, or not, by whoever submitted them."""

    def __init__(self, earlier: int = 0, write: Callable[[str], Any] = click.echo) -> None:
        self._write = write
        self._step = -1
        self._earlier = self._incarnation = earlier
        self._said: dict[str, str] = {}

    def update(self, status: render.Status) -> None:
        if status["incarnation"] != self._incarnation:
            self._begin(status)
        self._say_once("state", f"{status['state']} {render.note(status)}".strip())
        if status["incarnation"] <= self._earlier:
            return
        for line in read_latest(RunPaths(Path(status["run"])).metrics, MOST_LINES):
            if line["step"] > self._step:
                self._step = line["step"]
                where = f"step {line['step']}/{status['total_steps']}"
                self._write(f"{where}  {render.metrics(line)}".rstrip())
        if status["checkpoint"] is not None:
            self._say_once("commit", f"committed step {status['checkpoint']['step']}")

    def note(self, text: str) -> None:
        self._write(text)

    def _begin(self, status: render.Status) -> None:
        """Steps after the last commit are done again, and shown again."""
        committed = status["checkpoint"]["step"] if status["checkpoint"] else -1
        self._step = min(self._step, committed) if self._step >= 0 else committed
        self._incarnation = status["incarnation"]
        if self._incarnation > 1:
            self._write(f"incarnation {self._incarnation} goes on from step {max(committed, 0)}")

    def _say_once(self, kind: str, text: str) -> None:
        if self._said.get(kind) != text:
            self._said[kind] = text
            self._write(text)


class LiveView(View):
    """Redrawn in place; notes scroll by above it."""

    def __init__(self) -> None:
        from rich.live import Live

        self._live = Live(transient=True, refresh_per_second=4)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def update(self, status: render.Status) -> None:
        self._live.update(picture(status))

    def note(self, text: str) -> None:
        self._live.console.print(text, highlight=False, markup=False)


def picture(status: render.Status) -> Any:
    """The rich renderable of a running trial."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    total = status["total_steps"] or 1
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=total, completed=min(status["step"], total), width=40),
        Text(f"step {render.progress(status)}"),
        Text(remaining(status)),
    )
    head = f"{status['trial']}  {status['state']}  {render.note(status)}".rstrip()
    lines = [render.metrics(status["metrics"]), f"commit: {render.commit(status)}"]
    if status["incarnation"] > 1:
        lines[-1] += f"   incarnation {status['incarnation']}"
    return Group(Text(head, style="bold"), bar, *(Text(line) for line in lines if line))


def remaining(status: render.Status) -> str:
    """Time to the last step at the pace of the newest ones."""
    step_s, left_s = status["timing"]["step_s"], status["timing"]["left_s"]
    return f"{step_s:.3g} s/step, {age(left_s)} left" if step_s and left_s else ""


def make_view(*, silent: bool, earlier: int) -> View:
    """``earlier``: incarnations before those that are watched."""
    if silent:
        return View()
    return LiveView() if sys.stdout.isatty() else PlainView(earlier)
