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

from slurmrl.backoff import Backoff
from slurmrl.cli import layout, render
from slurmrl.cli.options import common, json_option
from slurmrl.errors import EnvironmentFailure

if TYPE_CHECKING:
    from slurmrl.errors import SlurmrlError
    from slurmrl.monitor.collect import SchedulerFactory
    from slurmrl.paths import RunPaths

FIRST_S, LONGEST_S = 1.0, 30.0
"""Pauses between two looks: after a change, and when nothing has changed for long."""
ENDS = ("COMPLETED", "FAILED", "CANCELLED")


@click.command()
@click.argument("name", required=False, metavar="[EXPERIMENT[/TRIAL]]")
@json_option
@click.option("--watch", is_flag=True, help="Look again and again until all have ended.")
@common
def status(name: str | None, as_json: bool, watch: bool, root: str | None) -> int:
    """Show how trials are doing: all of them, those of an experiment, or one in detail."""
    from slurmrl.submission import trials

    folder = trials.root_folder(root)
    if watch:
        _watch(folder, name, as_json)
    else:
        click.echo(_text(folder, name, _collect(folder, name), as_json))
    return 0


def _chosen(root: Path, name: str | None) -> list[RunPaths]:
    from slurmrl.submission import trials

    if name is None:
        return trials.all_trials(root)
    if "/" in name:
        return [trials.find(root, name)]
    return trials.find_experiment(root, name)


def _collect(
    root: Path, name: str | None, schedulers: SchedulerFactory | None = None
) -> list[dict[str, Any]]:
    from slurmrl.monitor.collect import collect
    from slurmrl.scheduler import make

    chosen, ask = _chosen(root, name), schedulers or make
    if _single(name):
        return collect(chosen, ask, detailed=True)
    return collect(chosen, ask, unreadable=_tell)


class _Polled:
    """A scheduler that is asked seldom, however often we look at the run directories."""

    def __init__(self, kind: str) -> None:
        from slurmrl.scheduler import make
        from slurmrl.scheduler.poll import SchedulerPoll

        scheduler = make(kind)
        self.recover = scheduler.recover
        self.query = scheduler.query if kind == "local" else SchedulerPoll(kind, scheduler).query


def _single(name: str | None) -> bool:
    return name is not None and "/" in name


def _tell(paths: RunPaths, error: SlurmrlError) -> None:
    """One broken run directory does not hide the others."""
    click.echo(f"{paths.experiment}/{paths.trial} left out: {error}", err=True)


def _text(root: Path, name: str | None, statuses: list[dict[str, Any]], as_json: bool) -> str:
    single = _single(name)
    if as_json:
        return json.dumps(statuses[0] if single else statuses)
    if not statuses:
        return f"no trials in {root} yet"
    width = layout.width()
    return render.one(statuses[0], width) if single else render.many(statuses, width)


def _watch(root: Path, name: str | None, as_json: bool) -> None:
    """Redraw in a terminal; elsewhere, and as JSON, say what has changed."""
    with ExitStack() as stack:
        terminal = sys.stdout.isatty() and not as_json
        show = _redrawing(stack) if terminal else click.echo
        schedulers = functools.cache(_Polled)
        backoff = Backoff(FIRST_S, LONGEST_S, sleep=time.sleep)
        shown: object = None
        while True:
            try:
                statuses = _collect(root, name, schedulers)
            except EnvironmentFailure as error:  # it may answer again
                click.echo(f"cannot look: {error}", err=True)
                backoff.sleep()
                continue
            news = [_gist(one) for one in statuses]
            if news != shown:
                backoff.reset()
            ended = all(one["state"] in ENDS for one in statuses)
            if terminal or news != shown:
                text = _text(root, name, statuses, as_json)
                show(f"{text}\n{_footer()}" if terminal and not ended else text)
            shown = news
            if ended:
                return
            backoff.sleep()


def _footer() -> str:
    now = time.strftime("%H:%M:%S")
    return f"\nat {now}; looks again at least every {LONGEST_S:.0f} s, Ctrl-C leaves the run alone"


def _gist(status: dict[str, Any]) -> tuple[object, ...]:
    """What has to change for a status to be news: not the mere age of something."""
    checkpoint = status["checkpoint"] or {}
    return (
        status["trial"],
        status["state"],
        status["step"],
        checkpoint.get("step"),
        render.note(status),
        [finding["code"] for finding in status["findings"]],
        [(row["number"], row["how"]) for row in status["incarnations"]],
    )


def _redrawing(stack: ExitStack) -> Callable[[str], None]:
    from rich.live import Live
    from rich.text import Text

    live = stack.enter_context(Live(auto_refresh=False))
    return lambda text: live.update(Text(text), refresh=True)
