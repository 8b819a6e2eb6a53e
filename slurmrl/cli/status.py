"""``slurmrl status``."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmrl.cli import render
from slurmrl.cli.follow import PolledScheduler, Seen, follow
from slurmrl.cli.options import common, json_option
from slurmrl.display import columns

if TYPE_CHECKING:
    from slurmrl.errors import SlurmrlError
    from slurmrl.monitor.collect import SchedulerFactory
    from slurmrl.paths import RunPaths

FIRST_S, LONGEST_S = 1.0, 30.0
"""Pauses of ``--watch``: a look at many trials costs more than one at new events or output."""
ENDS = ("COMPLETED", "FAILED", "CANCELLED")


@click.command()
@click.argument("name", required=False, metavar="[EXPERIMENT[/TRIAL]]")
@json_option
@click.option("--watch", is_flag=True, help="Refresh until all trials have ended.")
@common
def status(name: str | None, as_json: bool, watch: bool, root: str | None) -> int:
    """Show the state of all trials, of those of an experiment, or of one trial in detail."""
    from slurmrl.submission import trials

    folder = trials.root_folder(root)
    if watch:
        _Watch(folder, name, as_json=as_json).run()
    else:
        click.echo(_text(folder, name, _collect(folder, name, whole=as_json), as_json))
    return 0


def _chosen(root: Path, name: str | None) -> list[RunPaths]:
    from slurmrl.submission import trials

    if name is None:
        return trials.all_trials(root)
    if "/" in name:
        return [trials.find(root, name)]
    return trials.find_experiment(root, name)


def _collect(
    root: Path, name: str | None, schedulers: SchedulerFactory | None = None, *, whole: bool
) -> list[dict[str, Any]]:
    """Return the objects of the chosen trials; in a list those that are not ``whole`` have only
    what it shows."""
    from slurmrl.monitor.collect import collect, glance
    from slurmrl.scheduler import make

    chosen, ask = _chosen(root, name), schedulers or make
    if _single(name):
        return collect(chosen, ask, detailed=True)
    return (collect if whole else glance)(chosen, ask, unreadable=_report)


def _single(name: str | None) -> bool:
    return name is not None and "/" in name


def _report(paths: RunPaths, error: SlurmrlError) -> None:
    """Report a broken run directory, so that it does not hide the others."""
    click.echo(f"{paths.experiment}/{paths.trial} left out: {error}", err=True)


def _text(root: Path, name: str | None, statuses: list[dict[str, Any]], as_json: bool) -> str:
    single = _single(name)
    if as_json:
        return json.dumps(statuses[0] if single else statuses)
    if not statuses:
        return f"no trials in {root} yet"
    width = columns.width()
    return render.one(statuses[0], width) if single else render.many(statuses, width)


class _Watch:
    """Redraws in a terminal; elsewhere, and as JSON, prints what has changed."""

    def __init__(self, root: Path, name: str | None, *, as_json: bool) -> None:
        self._root = root
        self._name = name
        self._as_json = as_json
        self._schedulers = functools.cache(PolledScheduler)
        self._shown: object = None

    def run(self) -> None:
        with ExitStack() as stack:
            self._redraws = sys.stdout.isatty() and not self._as_json
            self._show = _redrawing(stack) if self._redraws else click.echo
            follow(self._look, FIRST_S, LONGEST_S)

    def _look(self) -> Seen:
        statuses = _collect(self._root, self._name, self._schedulers, whole=self._as_json)
        gist = [_gist(status) for status in statuses]
        news, self._shown = gist != self._shown, gist
        ended = all(status["state"] in ENDS for status in statuses)
        if self._redraws or news:
            text = _text(self._root, self._name, statuses, self._as_json)
            self._show(f"{text}\n{_footer()}" if self._redraws and not ended else text)
        return Seen.END if ended else Seen.NEWS if news else Seen.NOTHING_NEW


def _footer() -> str:
    now = time.strftime("%H:%M:%S")
    every = f"refreshed at least every {LONGEST_S:.0f} s"
    return f"\nat {now}; {every}; Ctrl-C ends this view, not the run"


def _gist(status: dict[str, Any]) -> tuple[object, ...]:
    """Return what must change for a status to be news; ages alone are not."""
    checkpoint = status["checkpoint"] or {}
    ended = status["state"] in ENDS
    return (
        status["trial"],
        status["state"],
        status["step"],
        checkpoint.get("step"),
        status["reason"] if ended else render.note(status),
        [finding["code"] for finding in status["findings"]],
        [] if ended else [(row["number"], row["how"]) for row in status["incarnations"]],
    )


def _redrawing(stack: ExitStack) -> Callable[[str], None]:
    from rich.live import Live
    from rich.text import Text

    live = stack.enter_context(Live(auto_refresh=False))
    return lambda text: live.update(Text(text), refresh=True)
