"""``slurmrl status``."""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmrl.cli import status_text
from slurmrl.cli.following import PolledScheduler, Seen, follow
from slurmrl.cli.options import common, complete_trials, examples, json_option
from slurmrl.display import terminal
from slurmrl.display.terminal import plain

if TYPE_CHECKING:
    from slurmrl.errors import SlurmrlError
    from slurmrl.run.paths import RunPaths
    from slurmrl.watch.overview import SchedulerFactory

STATES = ("RUNNING", "PENDING", "INTERRUPTED", "FAILED", "CANCELLED", "COMPLETED")
"""States in the order of ``--sort state``."""
FIRST_S, LONGEST_S = 1.0, 30.0
"""Shortest and longest pause of ``--watch`` in seconds, because reading many trials is costly."""


@click.command(
    epilog=examples(
        "slurmrl status",
        "slurmrl status grpo/1 --watch",
        "slurmrl status --state failed --state interrupted --sort age",
        "slurmrl status grpo --json --exit-status",
    )
)
@click.argument(
    "names", nargs=-1, metavar="[EXPERIMENT[/TRIAL]]...", shell_complete=complete_trials
)
@json_option
@click.option(
    "--watch",
    is_flag=True,
    help="Refresh until no trial is running or queued. In a pipe, print a line for each change.",
)
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(STATES, case_sensitive=False),
    help="List only trials in this state; may be repeated.",
)
@click.option(
    "--sort",
    "order",
    type=click.Choice(["name", "age", "state"]),
    default="name",
    show_default=True,
    help="Order of a list; age lists the newest submission first.",
)
@click.option("--exit-status", is_flag=True, help="Exit with 1 if one of the trials has failed.")
@common
def status(
    names: tuple[str, ...],
    as_json: bool,
    watch: bool,
    states: tuple[str, ...],
    order: str,
    exit_status: bool,
    root: str | None,
) -> int:
    """Show the state of all trials, of some trials or experiments, or of one trial in detail.

    AGE is the time since the trial was last submitted or resumed.
    """
    from slurmrl.desk import trials

    wanted = _Wanted(trials.root_folder(root), names, states, order)
    if watch:
        statuses = _Watch(wanted, as_json=as_json).run()
    else:
        statuses = _collect(wanted, whole=as_json)
        click.echo(_text(wanted, statuses, as_json))
    return int(exit_status and any(status["state"] == "FAILED" for status in statuses))


def _chosen(root: Path, names: Sequence[str]) -> list[RunPaths]:
    from slurmrl.desk import trials

    if not names:
        return trials.all_trials(root)
    found = [
        [trials.find(root, name)] if "/" in name else trials.find_experiment(root, name)
        for name in names
    ]
    return list(dict.fromkeys(itertools.chain.from_iterable(found)))


@dataclass(frozen=True)
class _Wanted:
    """Trials that the command line selects."""

    root: Path
    names: Sequence[str]
    """Names of trials and experiments; empty for all trials."""
    states: Sequence[str]
    """States of trials to list; empty for all states."""
    order: str

    @property
    def single(self) -> bool:
        """Whether the command shows only one trial, in detail."""
        return len(self.names) == 1 and "/" in self.names[0]

    def listed(self, statuses: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the statuses in the wanted states, sorted by the wanted order, then by name."""
        kept = [one for one in statuses if not self.states or one["state"] in self.states]
        if self.order == "age":
            kept.sort(key=lambda one: -(one["submitted"] or 0.0))
        elif self.order == "state":
            kept.sort(key=lambda one: STATES.index(one["state"]))
        return kept


def _collect(
    wanted: _Wanted, schedulers: SchedulerFactory | None = None, *, whole: bool
) -> list[dict[str, Any]]:
    """Return the status objects of the chosen trials.

    Unless ``whole``, objects of a list have only the values that the list shows.
    """
    from slurmrl.scheduler import make
    from slurmrl.watch.overview import collect, glance

    chosen, ask = _chosen(wanted.root, wanted.names), schedulers or make
    if wanted.single:
        return collect(chosen, ask, detailed=True)
    return wanted.listed((collect if whole else glance)(chosen, ask, unreadable=_report))


def _report(paths: RunPaths, error: SlurmrlError) -> None:
    """Report an unreadable run directory, so that the command can show the other trials."""
    click.echo(f"{paths.full_name} left out: {error}", err=True)


def _text(wanted: _Wanted, statuses: Sequence[dict[str, Any]], as_json: bool) -> str:
    if as_json:
        return json.dumps(statuses[0] if wanted.single else statuses)
    if not statuses:
        states = f" {' or '.join(wanted.states)}" if wanted.states else ""
        return f"no{states} trials in {wanted.root}{'' if states else ' yet'}"
    width = terminal.width()
    return (
        status_text.one(statuses[0], width) if wanted.single else status_text.many(statuses, width)
    )


class _Watch:
    """Redraws the statuses in a terminal.

    Without a terminal, print a line for each changed trial; with JSON, all status objects.
    """

    def __init__(self, wanted: _Wanted, *, as_json: bool) -> None:
        self._wanted = wanted
        self._as_json = as_json
        self._schedulers = functools.cache(PolledScheduler)
        self._gists: dict[str, tuple[object, ...]] = {}
        self._statuses: list[dict[str, Any]] = []
        self._rest = Rest()

    def run(self) -> list[dict[str, Any]]:
        """Return the last statuses."""
        with ExitStack() as stack:
            self._redraws = sys.stdout.isatty() and not self._as_json
            self._show = _redrawing(stack) if self._redraws else click.echo
            follow(self._look, FIRST_S, LONGEST_S)
        return self._statuses

    def _look(self) -> Seen:
        statuses = _collect(self._wanted, self._schedulers, whole=self._as_json)
        gists = {status["trial"]: _gist(status) for status in statuses}
        news = [one for one in statuses if gists[one["trial"]] != self._gists.get(one["trial"])]
        self._statuses, self._gists = statuses, gists
        ended = self._rest.begins(statuses)
        if self._redraws or (self._as_json and news):
            text = _text(self._wanted, statuses, self._as_json)
            self._show(f"{text}\n{_footer()}" if self._redraws and not ended else text)
        elif news:
            self._show("\n".join(map(_line, news)))
        return Seen.END if ended else Seen.NEWS if news else Seen.NOTHING_NEW


class Rest:
    """Detects when no trial can change any more unless a user runs a command.

    Each trial must have ended, or have no job in two consecutive reports of the scheduler. A single
    report is not enough: a trial may end after its history is read and before the scheduler is
    asked.
    """

    def __init__(self) -> None:
        self._rested = False

    def begins(self, statuses: Sequence[dict[str, Any]]) -> bool:
        before, self._rested = self._rested, all(map(_is_over, statuses))
        ended = all(one["state"] != "INTERRUPTED" for one in statuses)
        return self._rested and (ended or before)


def _is_over(status: dict[str, Any]) -> bool:
    return status["state"] not in status_text.LIVES and not status.get("problem")


def _line(status: dict[str, Any]) -> str:
    """Return a line such as ``16:02:29  add/1  RUNNING  step 12/60  2.9 s a step``."""
    parts = (time.strftime("%H:%M:%S"), status["trial"], status["state"])
    return "  ".join([*parts, f"step {status_text.progress(status)}", plain(status["diagnosis"])])


def _footer() -> str:
    now = time.strftime("%H:%M:%S")
    every = f"refreshed at least every {LONGEST_S:.0f} s"
    return f"\nat {now}; {every}; Ctrl-C ends this view, not the run"


def _gist(status: dict[str, Any]) -> tuple[object, ...]:
    """Return the fields whose changes are printed; ages are not among them."""
    checkpoint = status["checkpoint"] or {}
    ended = _is_over(status)
    return (
        status["trial"],
        status["state"],
        status["step"],
        checkpoint.get("step"),
        status["reason"] if ended else status_text.note(status),
        [finding["code"] for finding in status["findings"]],
        [] if ended else [(row["number"], row["how"]) for row in status["incarnations"]],
    )


def _redrawing(stack: ExitStack) -> Callable[[str], None]:
    from rich.live import Live
    from rich.text import Text

    live = stack.enter_context(Live(auto_refresh=False))
    return lambda text: live.update(Text(text), refresh=True)
