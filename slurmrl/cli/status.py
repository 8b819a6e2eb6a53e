"""``slurmrl status``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmrl.cli import render
from slurmrl.cli.options import common, json_option

if TYPE_CHECKING:
    from slurmrl.errors import SlurmrlError
    from slurmrl.paths import RunPaths

WATCH_S = 2.0
"""Seconds between two looks."""
ENDS = ("COMPLETED", "FAILED", "CANCELLED")


@click.command()
@click.argument("name", required=False, metavar="[EXPERIMENT[/TRIAL]]")
@json_option
@click.option("--watch", is_flag=True, help="Look again every two seconds until all have ended.")
@common
def status(name: str | None, as_json: bool, watch: bool, root: str | None) -> int:
    """Show how trials are doing: all of them, those of an experiment, or one in detail."""
    from slurmrl.submission import trials

    folder = trials.root_folder(root)
    if watch:
        _watch(folder, name, as_json)
    else:
        click.echo(_text(folder, name, _collect(_chosen(folder, name)), as_json))
    return 0


def _chosen(root: Path, name: str | None) -> list[RunPaths]:
    from slurmrl.submission import trials

    if name is None:
        return trials.all_trials(root)
    if "/" in name:
        return [trials.find(root, name)]
    return trials.find_experiment(root, name)


def _collect(chosen: list[RunPaths]) -> list[dict[str, Any]]:
    from slurmrl.monitor.collect import collect
    from slurmrl.scheduler import make

    if len(chosen) == 1:
        return collect(chosen, make)
    return collect(chosen, make, unreadable=_tell)


def _tell(paths: RunPaths, error: SlurmrlError) -> None:
    """One broken run directory does not hide the others."""
    click.echo(f"{paths.experiment}/{paths.trial} left out: {error}", err=True)


def _text(root: Path, name: str | None, statuses: list[dict[str, Any]], as_json: bool) -> str:
    single = name is not None and "/" in name
    if as_json:
        return json.dumps(statuses[0] if single else statuses)
    if not statuses:
        return f"no trials in {root} yet"
    return render.one(statuses[0]) if single else render.many(statuses)


def _watch(root: Path, name: str | None, as_json: bool) -> None:
    """Redraw in a terminal; elsewhere, and as JSON, one status after the other."""
    with ExitStack() as stack:
        show: Callable[[str], None] = click.echo
        if sys.stdout.isatty() and not as_json:
            show = _redrawing(stack)
        while True:
            statuses = _collect(_chosen(root, name))
            show(_text(root, name, statuses, as_json))
            if all(one["state"] in ENDS for one in statuses):
                return
            time.sleep(WATCH_S)


def _redrawing(stack: ExitStack) -> Callable[[str], None]:
    from rich.live import Live
    from rich.text import Text

    live = stack.enter_context(Live(auto_refresh=False))
    return lambda text: live.update(Text(text), refresh=True)
